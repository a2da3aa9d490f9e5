// A page from disk may not read other pages, from which the search takes its excerpts.
if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;

// What can be scrolled sideways can take the focus, so that the keyboard scrolls it too.
document.addEventListener("DOMContentLoaded", () => {
  for (const part of document.querySelectorAll(".highlight pre, .cell_output .output, .table-wrapper, div.math"))
    if (part.scrollWidth > part.clientWidth) part.tabIndex = 0;
  for (const caption of document.querySelectorAll("p.caption[role=heading]")) caption.setAttribute("aria-level", "2");
});
