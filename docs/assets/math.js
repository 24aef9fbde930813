// Render what pymdownx.arithmatex marks, with the copy of KaTeX beside this file.
document.querySelectorAll(".arithmatex").forEach((element) => {
  const text = element.textContent.trim();
  const source = text.slice(2, -2); // \( ... \) or \[ ... \]
  katex.render(source, element, { displayMode: text.startsWith("\\["), throwOnError: true });
});
