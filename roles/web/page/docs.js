// The OpenAPI document for people: every endpoint with its parameters and answers, and every record with its fields.

import { byId, h } from "./dom.js";

const ROOT = "api/v1/openapi.json";
const said = await (await fetch(ROOT)).json();
const main = byId("main");

main.append(h("p", {}, ...text(said.info.description)), h("p", {}, "For programs: ", h("a", { href: ROOT }, ROOT)));
let tag = "";
for (const [path, operations] of Object.entries(said.paths)) {
  for (const [method, operation] of Object.entries(operations)) {
    if (operation.tags[0] !== tag) main.append(h("h2", {}, (tag = operation.tags[0])));
    main.append(endpoint(method, path, operation));
  }
}
main.append(h("h2", {}, "records"), ...Object.entries(said.components.schemas).map(record));

function endpoint(method, path, operation) {
  const rows = operation.parameters.map((each) => [each.name, each.in, kind(each.schema), text(each.description ?? "")]);
  if (operation.requestBody) rows.push(["body", "", kind(content(operation.requestBody)), []]);
  for (const [status, answer] of Object.entries(operation.responses)) {
    rows.push([status, "", status.startsWith("2") ? kind(content(answer)) : [], text(answer.description)]);
  }
  const head = [h("b", {}, `${method.toUpperCase()} `), h("code", {}, path), " ", ...text(operation.summary)];
  return h("details", {}, h("summary", {}, ...head), h("p", {}, ...text(operation.description)), table(rows));
}

function record([name, schema]) {
  const fields = Object.entries(schema.properties ?? {});
  const rows = fields.map(([key, value]) => [key, kind(value), text(value.description ?? "")]);
  const about = h("p", {}, ...text(schema.description ?? ""));
  return h("details", { id: name }, h("summary", {}, name), about, table(rows));
}

function table(rows) {
  return h("table", {}, ...rows.map((cells) => h("tr", {}, ...cells.map((cell) => h("td", {}, ...[cell].flat())))));
}

function kind(schema) {
  const name = schema.$ref?.split("/").pop();
  if (name) return [h("a", { href: `#${name}` }, name)];
  if (schema.anyOf) return schema.anyOf.flatMap((each, index) => (index ? [" or ", ...kind(each)] : kind(each)));
  if (schema.enum) return [schema.enum.join(", ")];
  if (schema.type === "array") return ["list of ", ...kind(schema.items ?? {})];
  if (schema.properties?.next) return [...kind(schema.properties.items), ", and next"];
  return [[schema.type ?? "any"].flat().join(" or ")];
}

function content(part) {
  return part.content["application/json"].schema;
}

/** Text with `code` in backticks. */
function text(words) {
  const pieces = words.replaceAll("``", "`").split("`");
  return pieces.map((piece, index) => (index % 2 ? h("code", {}, piece) : piece));
}
