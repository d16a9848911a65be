// The little of Markdown that chat models write: fenced code, headings, lists, emphasis, inline code. Builds elements,
// so nothing that a model writes can become markup; links stay text.

import { copy, element } from "./dom.js";

const INLINE = /(`+)(.+?)\1|\*\*(.+?)\*\*|(?<![\w*])\*([^*\s][^*]*?)\*(?![\w*])/s;

function inline(text) {
  const parts = [];
  let rest = text;
  for (let found; (found = INLINE.exec(rest)); ) {
    if (found.index) parts.push(rest.slice(0, found.index));
    if (found[2] !== undefined) parts.push(element("code", { textContent: found[2] }));
    else if (found[3] !== undefined) parts.push(element("strong", {}, ...inline(found[3])));
    else parts.push(element("em", {}, ...inline(found[4])));
    rest = rest.slice(found.index + found[0].length);
  }
  if (rest) parts.push(rest);
  return parts;
}

function fence(language, lines) {
  const text = lines.join("\n");
  const press = (event) => copy(text, event.currentTarget);
  const head = element(
    "div",
    { class: "fence-head" },
    element("span", { textContent: language || "text" }),
    element("button", { type: "button", class: "quiet", textContent: "Copy", on: { click: press } }),
  );
  const code = element("pre", { class: "code", tabIndex: 0 }, element("code", { textContent: text }));
  return element("div", { class: "fence" }, head, code);
}

const ITEM = /^\s*(?:[-*+]|(\d+)[.)])\s+(.*)$/;

function paragraphs(lines) {
  const made = [];
  let text = [];
  let list = null;
  const flush = () => {
    if (text.length) made.push(element("p", {}, ...inline(text.join("\n"))));
    text = [];
  };
  for (const line of lines) {
    const heading = /^#{1,6}\s+(.*)$/.exec(line);
    const item = ITEM.exec(line);
    if (!item && line.trim()) list = null;
    if (heading) {
      flush();
      made.push(element("p", { class: "heading" }, ...inline(heading[1])));
    } else if (item) {
      flush();
      const kind = item[1] === undefined ? "ul" : "ol";
      if (list?.localName !== kind) {
        list = element(kind, kind === "ol" ? { start: Number(item[1]) } : {});
        made.push(list);
      }
      list.append(element("li", {}, ...inline(item[2])));
    } else if (line.trim()) text.push(line);
    else flush();
  }
  flush();
  return made;
}

/** The elements of a text, finished or still growing. */
export function rendered(text) {
  const made = [];
  let plain = [];
  let code = null;
  for (const line of text.split("\n")) {
    const mark = /^\s*```+\s*(\S*)/.exec(line);
    if (mark && code) {
      made.push(fence(code.language, code.lines));
      code = null;
    } else if (mark) {
      made.push(...paragraphs(plain));
      plain = [];
      code = { language: mark[1], lines: [] };
    } else (code?.lines ?? plain).push(line);
  }
  if (code) made.push(fence(code.language, code.lines));
  return [...made, ...paragraphs(plain)];
}
