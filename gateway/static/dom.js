// Elements made by hand: text only ever enters the page as text. Knows no API.

/** An element. `properties` are DOM properties, but for `class`, `data`, `on` (listeners) and names with a dash. */
export function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (value === undefined || value === null) continue;
    if (key === "class") made.className = value;
    else if (key === "data") Object.assign(made.dataset, value);
    else if (key === "on") for (const [event, listener] of Object.entries(value)) made.addEventListener(event, listener);
    else if (key.includes("-") || key === "role" || key === "for" || key === "colspan") made.setAttribute(key, value);
    else made[key] = value;
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export const byId = (id) => document.getElementById(id);

/** A button with a text. */
export const button = (text, press, properties = {}) =>
  element("button", { type: "button", textContent: text, ...properties, on: { click: press } });

/** Whole numbers with thin spaces between thousands, as 12 345. */
export const count = (number) => Math.round(number).toLocaleString("en").replaceAll(",", "\u202f");

/** A time in seconds as people write it: 840 µs, 12.3 ms, 1.24 s, 3 min. */
export function duration(seconds) {
  if (seconds < 0.001) return `${Math.round(seconds * 1e6)} µs`;
  if (seconds < 0.1) return `${(seconds * 1e3).toFixed(1)} ms`;
  if (seconds < 1) return `${Math.round(seconds * 1e3)} ms`;
  if (seconds < 120) return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
  return `${Math.round(seconds / 60)} min`;
}

/** Copies a text, and says so on the button that asked. */
export async function copy(text, button) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed";
  }
  setTimeout(() => (button.textContent = before), 1200);
}

/** Shows a modal dialog and resolves to what its form was submitted with (`returnValue`); "" when it was dismissed. */
export function ask(dialog) {
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => resolve(dialog.returnValue), { once: true }));
}
