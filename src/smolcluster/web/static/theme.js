// Light or dark: follows the system until the user chooses. Shared by all pages.

const KEY = "theme";

function stored() {
  try {
    return localStorage.getItem(KEY);
  } catch {
    return null; // storage may be forbidden
  }
}

/** `changed` is called when the colours change. */
export function startTheme(button, changed = () => {}) {
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const show = (theme) => {
    if (theme === "light" || theme === "dark") root.dataset.theme = theme;
    else delete root.dataset.theme;
    changed();
  };
  show(stored());
  dark.addEventListener("change", changed);
  button.addEventListener("click", () => {
    const next = (root.dataset.theme ?? (dark.matches ? "dark" : "light")) === "dark" ? "light" : "dark";
    try {
      localStorage.setItem(KEY, next);
    } catch {
      // then for this page only
    }
    show(next);
  });
}
