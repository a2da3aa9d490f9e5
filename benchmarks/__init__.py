"""The course's measurements, as scripts; what they find goes to results/<machine>.json, stamped with its origin."""
