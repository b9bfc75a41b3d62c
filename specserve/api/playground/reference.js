// Draws the reference of the API from openapi.json. Everything becomes text, never markup.

import { Key } from "./key.js";
import { Server } from "./server.js";

const part = (id) => document.getElementById(id);
const key = new Key(() => draw());
const server = new Server(key);
let shapes = {}; // by name

async function draw() {
  let description;
  try {
    description = await server.description();
  } catch (refusal) {
    part("state").textContent = refusal.message;
    if (refusal.status === 401) key.ask(refusal.message);
    return;
  }
  shapes = description.components?.schemas ?? {};
  const operations = Object.entries(description.paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, operation]) => ({ title: `${method.toUpperCase()} ${path}`, operation })),
  );
  const inner = Object.keys(shapes).filter((name) => shapes[name].properties).sort();
  part("paths").replaceChildren(
    ...operations.map(({ title, operation }) => pathCard(title, operation)),
    ...inner.map((name) => shapeCard(name, shapes[name])),
  );
  part("contents").replaceChildren(...operations.map(({ title }) => link(title)));
  part("shape-contents").replaceChildren(...inner.map(link));
  const names = (await server.models().catch(() => [])).map(({ id }) => id);
  part("state").textContent = names.length ? `Model ${names.join(", ")}.` : "";
  part("state").classList.toggle("ready", names.length > 0);
}

function pathCard(title, operation) {
  const body = operation.requestBody?.content?.["application/json"]?.schema;
  const name = body?.$ref?.split("/").pop();
  const words = operation.description ?? operation.summary ?? "";
  const rows = (operation.parameters ?? []).map(({ name, required, schema, description }) => row(name, schema, required, description));
  return card(title, words, name ? rowsOf(shapes[name]) : rows);
}

const shapeCard = (name, shape) => card(name, shape.description ?? "", rowsOf(shape));

function card(title, words, rows) {
  const section = element("section", { className: "card", id: anchor(title) });
  section.append(element("h2", { textContent: title }));
  if (words) section.append(element("p", { textContent: words }));
  if (!rows.length) return section;
  const scroll = element("div", { className: "scroll", tabIndex: 0 });
  scroll.setAttribute("role", "region");
  scroll.setAttribute("aria-label", `Parameters of ${title}`);
  const table = element("table"), head = table.createTHead().insertRow();
  for (const heading of ["parameter", "type", "meaning"]) head.append(element("th", { scope: "col", textContent: heading }));
  table.append(element("tbody"));
  table.tBodies[0].append(...rows);
  scroll.append(table);
  section.append(scroll);
  return section;
}

// Required members first.
function rowsOf(shape) {
  const required = new Set(shape.required ?? []);
  const names = Object.keys(shape.properties ?? {}).sort((a, b) => required.has(b) - required.has(a));
  return names.map((name) => row(name, shape.properties[name], required.has(name), shape.properties[name].description));
}

function row(name, schema, required, words = "") {
  const line = element("tr"), first = element("td"), second = element("td");
  first.append(element("code", { textContent: name }));
  second.append(...kind(schema ?? {}));
  line.append(first, second, element("td", { textContent: `${required ? "Required. " : ""}${words}` }));
  return line;
}

// The type in words, with links to shapes. Null is left out: it means that the parameter is not given.
function kind(schema) {
  const branches = schema.anyOf ?? schema.oneOf;
  if (branches) {
    return branches.filter(({ type }) => type !== "null").flatMap((one, number) => [...(number ? [" or "] : []), ...kind(one)]);
  }
  if (schema.$ref) {
    const name = schema.$ref.split("/").pop();
    return shapes[name]?.properties ? [link(name).firstChild] : kind(shapes[name] ?? {}); // the name of a list has no card
  }
  if (schema.enum || "const" in schema) return [(schema.enum ?? [schema.const]).map((value) => JSON.stringify(value)).join(", ")];
  if (schema.type === "array") return ["list of ", ...kind(schema.items ?? {})];
  return [{ string: "text", integer: "whole number", number: "number", boolean: "true or false", object: "object" }[schema.type] ?? "any"];
}

function link(title) {
  const item = element("li");
  item.append(element("a", { href: `#${anchor(title)}`, textContent: title }));
  return item;
}

const anchor = (title) => title.toLowerCase().replace(/[^a-z0-9]+/g, "-");
const element = (name, members = {}) => Object.assign(document.createElement(name), members);

draw();
