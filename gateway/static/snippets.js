// The request on the page as a program: Python, Node or curl. The key is always a placeholder.

const EXTENSIONS = ["top_k", "min_p", "repetition_penalty"]; // the openai package for Python takes these in extra_body

function python(value, indent) {
  const inner = `${indent}    `;
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (Array.isArray(value)) {
    if (value.every((item) => typeof item !== "object")) return `[${value.map((item) => python(item, inner)).join(", ")}]`;
    return `[\n${value.map((item) => `${inner}${python(item, inner)},\n`).join("")}${indent}]`;
  }
  if (typeof value === "object") {
    return `{${Object.entries(value).map(([name, item]) => `${JSON.stringify(name)}: ${python(item, inner)}`).join(", ")}}`;
  }
  return JSON.stringify(value); // numbers and strings are written alike
}

function asPython(body, base) {
  const { stream_options: _, ...shown } = body;
  const extra = Object.fromEntries(EXTENSIONS.filter((name) => name in shown).map((name) => [name, shown[name]]));
  const own = Object.entries(shown).filter(([name]) => !(name in extra));
  if (Object.keys(extra).length) own.push(["extra_body", extra]);
  return `import os

from openai import OpenAI

client = OpenAI(base_url=${JSON.stringify(base)}, api_key=os.environ["NORIA_API_KEY"])
stream = client.chat.completions.create(
${own.map(([name, value]) => `    ${name}=${python(value, "    ")},\n`).join("")})
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
`;
}

function asNode(body, base) {
  const { stream_options: _, ...shown } = body;
  const text = JSON.stringify(shown, null, 2).replace(/^(\s*)"(\w+)":/gm, "$1$2:");
  return `import OpenAI from "openai";

const client = new OpenAI({ baseURL: ${JSON.stringify(base)}, apiKey: process.env.NORIA_API_KEY });
const stream = await client.chat.completions.create(${text});
for await (const chunk of stream) process.stdout.write(chunk.choices[0]?.delta?.content ?? "");
`;
}

function asCurl(body, base) {
  const text = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  return `curl ${base}/chat/completions \\
  -H "Authorization: Bearer $NORIA_API_KEY" \\
  -H "Content-Type: application/json" \\
  -d '${text}'
`;
}

/** By name, in the order of the tabs. */
export const snippets = { Python: asPython, Node: asNode, curl: asCurl };
