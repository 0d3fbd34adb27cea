// What a request may say besides its text: the sampler's numbers, the answer's form, tools, anything else as JSON.

import { ApiError } from "./api.js";
import { field, h, options } from "./dom.js";

const NUMBERS = ["max_tokens", "temperature", "top_p", "top_k", "min_p", "seed"];
NUMBERS.push("repetition_penalty", "presence_penalty", "frequency_penalty");
const FORMS = { text: "Text", json_object: "Any JSON object", json_schema: "JSON of a schema" };
const CHOICES = { "": "None", auto: "The model may call them", required: "The answer is a call" };
const MORE = ["json_schema", "auto", "required"];
const OWN = ["model", "messages", "prompt", "stream", "stream_options", "n", "logprobs", "top_logprobs"];
const city = { type: "object", properties: { city: { type: "string", maxLength: 40 } }, required: ["city"] };
const SCHEMA = { ...city, additionalProperties: false };
const TOOLS = [{ type: "function", function: { name: "weather", description: "Weather of a city", parameters: city } }];

export class Parameters {
  #inputs = {};

  /** `chat`: whether there are a system prompt and tools. */
  constructor(card, chat) {
    this.chat = chat;
    this.most = Math.min(5, card.top_logprobs);
    const number = (name) => {
      const placeholder = card.generation_defaults?.[name] ?? "";
      return this.#field(name.replace("_", " "), name, "input", { type: "number", step: "any", placeholder });
    };
    const json = (label, name, example) => {
      const value = JSON.stringify(example, null, 1);
      const rows = Math.min(8, value.split("\n").length);
      return this.#field(label, name, "textarea", { rows, spellcheck: false, value });
    };
    this.element = h(
      "details",
      { class: "parameters", open: matchMedia("(min-width: 60rem)").matches },
      h("summary", {}, "Parameters"),
      chat && this.#field("System prompt", "system", "textarea", { rows: 2 }),
      h("div", { class: "numbers" }, NUMBERS.map(number)),
      this.#field("Stop at (one a line)", "stop", "textarea", { rows: 1 }),
      this.#choice("Answer", "form", FORMS, json("Schema", "schema", SCHEMA)),
      chat && card.tool_calls && this.#choice("Tools", "choice", CHOICES, json("Their schemas", "tools", TOOLS)),
      this.most > 0 && this.#field("Probabilities of tokens", "logprobs", "input", { type: "checkbox" }),
      json("Other fields, as JSON", "other", {}),
    );
  }

  #field(label, name, tag, properties, ...children) {
    this.#inputs[name] = h(tag, { name, ...properties }, ...children);
    return field(label, this.#inputs[name]);
  }

  /** A choice, of which those in MORE show `more`. */
  #choice(label, name, texts, more) {
    const choice = this.#field(label, name, "select", {}, options(texts));
    for (const one of this.#inputs[name].options) one.className = MORE.includes(one.value) ? "more" : "";
    return h("div", { class: "choice" }, choice, more);
  }

  #parsed(name) {
    try {
      return JSON.parse(this.#inputs[name].value);
    } catch (error) {
      this.#inputs[name].focus();
      throw new ApiError(400, `${name}: not JSON: ${error.message}`);
    }
  }

  value(name) {
    return this.#inputs[name].value;
  }

  /** Returns the fields of a body. Throws ApiError for what is no number or no JSON. */
  read() {
    const { stop, form, choice, logprobs } = this.#inputs;
    const body = {};
    for (const name of NUMBERS) {
      const { value, validity } = this.#inputs[name];
      if (validity.badInput) throw new ApiError(400, `${name} is not a number`);
      if (value !== "") body[name] = Number(value);
    }
    if (stop.value) body.stop = stop.value.split("\n").filter(Boolean);
    if (form.value !== "text") body.response_format = { type: form.value };
    if (form.value === "json_schema") {
      body.response_format.json_schema = { name: "answer", schema: this.#parsed("schema") };
    }
    if (choice?.value) Object.assign(body, { tools: this.#parsed("tools"), tool_choice: choice.value });
    if (logprobs?.checked) {
      Object.assign(body, this.chat ? { logprobs: true, top_logprobs: this.most } : { logprobs: this.most });
    }
    const other = this.#parsed("other");
    const own = OWN.find((name) => name in other);
    if (own) throw new ApiError(400, `other: the page sets ${own} itself`);
    return { ...body, ...other };
  }
}
