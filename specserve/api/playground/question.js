// What the form asks for, as the body of a request. Leaves out what is empty; the server checks the rest.

const form = document.getElementById("ask");

export function mode() {
  return form.elements.mode.value;
}

export function raceOrder() {
  return form.elements.order.value;
}

// Throws a SyntaxError where the schema is not JSON.
export function question(model, messages) {
  const chat = mode() === "chat", field = (name) => form.elements[name].value;
  const sampling = { temperature: +field("temperature"), top_p: +field("top_p"), ...given("seed", field("seed")) };
  const stop = field("stops").split("\n").filter((line) => line !== "");
  const schema = field("schema").trim(), system = field("system").trim();
  const body = {
    model,
    ...(chat ? { messages: [...(system ? [{ role: "system", content: system }] : []), ...messages] } : { prompt: field("prompt") }),
    max_tokens: +field("max_tokens"),
    ...sampling,
    ...(stop.length ? { stop } : {}),
    ...(schema ? { response_format: { type: "json_schema", json_schema: { name: "answer", strict: true, schema: JSON.parse(schema) } } } : {}),
    logprobs: chat ? true : 0,
    speculation: { gamma: field("gamma") === "" ? "auto" : +field("gamma"), verifier: field("verifier") },
  };
  return { path: chat ? "v1/chat/completions" : "v1/completions", body };
}

// The same without drafts.
export function withoutSpeculation({ path, body }) {
  return { path, body: { ...body, speculation: { ...body.speculation, gamma: 0 } } };
}

// Marks the field that a refusal is about.
export function blame(param) {
  const ids = { messages: "prompt", stop: "stop_texts", "speculation.gamma": "gamma", "speculation.verifier": "verifier", max_completion_tokens: "max_tokens" };
  for (const field of form.elements) unmark(field);
  const field = param && document.getElementById(ids[param] ?? param.split(/[.[]/)[0]);
  if (!field || !("value" in field)) return;
  reveal(field);
  field.setAttribute("aria-invalid", "true");
  field.setAttribute("aria-errormessage", "error");
}

// A field that is folded away can neither be seen nor get the focus.
function reveal(field) {
  const folded = field.closest("details");
  if (folded) folded.open = true;
}

for (const field of form.elements) field.addEventListener("invalid", () => reveal(field));

function unmark(field) {
  field.removeAttribute("aria-invalid");
  field.removeAttribute("aria-errormessage");
}

function given(name, value) {
  return value === "" ? {} : { [name]: +value };
}
