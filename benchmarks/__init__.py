"""The course's measurements, as scripts: what they find goes to results/<machine>.json, with a full stamp."""
