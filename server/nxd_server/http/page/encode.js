// What models of whole texts are for: embeddings compared, documents ranked, texts classified.

import { ask } from "./api.js";
import { bar, field, h, table, wide } from "./dom.js";

/** A view of a field of texts, with `more` above it, and of the table that `work` makes of them. */
function view(name, title, fits, value, work, more = () => null) {
  function make(session) {
    const [texts, first] = [h("textarea", { rows: 5, required: true, value }), more()];
    const fields = [first && field("Query", first), field("Texts, one a line", texts)];
    const result = wide("Result");
    const form = h("form", { class: "ask" }, fields, h("div", { class: "buttons" }, h("button", {}, title)));
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      const lines = texts.value.split("\n").filter((line) => line.trim());
      const error = ({ message }) => h("p", { class: "error", role: "alert" }, message);
      result.replaceChildren(await work(session.model, lines, first?.value).catch(error));
    });
    return h("div", {}, form, result);
  }
  return { name, title, fits, make };
}

const CATS = "A cat sits on the mat.\nA kitten rests on a rug.\nThe market fell today.";

async function compared(model, input) {
  const { data } = await ask("v1/embeddings", { model, input });
  const vectors = data.map(({ embedding }) => embedding);
  const dot = (a, b) => a.reduce((sum, value, place) => sum + value * b[place], 0);
  const cell = (a, b) => {
    const cosine = dot(a, b) / Math.sqrt(dot(a, a) * dot(b, b));
    return h("td", { class: `p${Math.max(0, Math.min(4, Math.floor(5 * cosine)))}` }, cosine.toFixed(3));
  };
  const rows = vectors.map((a, row) => [`${row + 1}. ${input[row]}`, ...vectors.map((b) => cell(a, b))]);
  return table(`Cosines of vectors of ${vectors[0].length} numbers`, ["Text", ...input.map((_, row) => row + 1)], rows);
}

async function ranked(model, documents, query) {
  const { results } = await ask("v1/rerank", { model, query, documents });
  const most = Math.max(...results.map((one) => one.relevance_score));
  const row = ({ document, relevance_score: score }) => [document.text, score.toFixed(4), bar(score / most)];
  return table("The best first", ["Document", "Score", "Of the best"], results.map(row));
}

async function classified(model, input) {
  const { data } = await ask("v1/classify", { model, input });
  const verdict = ({ label, probs, scores, entities }) => {
    if (entities) return [entities.map((one) => `${one.word}: ${one.entity_group ?? one.entity}`).join(", ")];
    return probs ? [label, Math.max(...probs).toFixed(3), bar(Math.max(...probs))] : [label, scores.join(" ")];
  };
  return table("What the model says", [], data.map((one, row) => [input[row], ...verdict(one)]));
}

const pairs = ({ task, labels }) => task === "embed" || (task === "classify" && labels === 1);
const labels = ({ task, labels }) => task === "token-classification" || (task === "classify" && labels !== 1);
const query = () => h("input", { value: "Where do cats sleep?", required: true });
export const embed = view("embed", "Compare", ({ task }) => task === "embed", CATS, compared);
export const rank = view("rank", "Rank", pairs, CATS, ranked, query);
export const classify = view("classify", "Classify", labels, CATS, classified);
