// The chosen theme, before anything is painted. "auto" follows the system. No secret is kept here.
"use strict";

(() => {
  const themes = ["auto", "light", "dark"];
  const root = document.documentElement;
  const read = () => {
    try {
      return localStorage.getItem("noria.theme") ?? "auto";
    } catch {
      return "auto"; // storage is switched off
    }
  };
  const show = (theme) => {
    root.dataset.theme = themes.includes(theme) ? theme : "auto";
    for (const button of document.querySelectorAll("[data-theme-button]")) {
      button.textContent = { auto: "Auto", light: "Light", dark: "Dark" }[root.dataset.theme];
      button.setAttribute("aria-label", `Theme: ${root.dataset.theme}. Change`);
    }
    document.dispatchEvent(new Event("noria:theme"));
  };
  show(read());
  document.addEventListener("DOMContentLoaded", () => {
    show(read());
    for (const button of document.querySelectorAll("[data-theme-button]")) {
      button.addEventListener("click", () => {
        const next = themes[(themes.indexOf(root.dataset.theme) + 1) % themes.length];
        try {
          localStorage.setItem("noria.theme", next);
        } catch {
          // then it holds for this page
        }
        show(next);
      });
    }
  });
})();
