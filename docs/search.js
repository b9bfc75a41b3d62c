/* The theme hides its search from pages that were opened as files, which may fetch no index. */
if (location.protocol === "file:") {
  const note = document.createElement("small");
  note.textContent = "Search needs a server: python -m http.server -d site";
  document.querySelector(".md-header__inner").append(note);
}
