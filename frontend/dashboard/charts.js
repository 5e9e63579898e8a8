/* Small charts over time, as SVG. Each has its newest values in words beneath, so that no colour is needed to read it. */

import { make, makeSvg } from "./dom.js";
import { clock, number, small } from "./words.js";

const WIDTH = 320;
const HEIGHT = 96;
const LEFT = 34;
const BOTTOM = 14;
const TOP = 6;
const MAX_VERSIONS = 4; // further ones are summed as "others"

const plot = () => makeSvg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" });
const across = (at, from, to) => LEFT + ((at - from) / Math.max(1e-9, to - from)) * (WIDTH - LEFT - 4);
const up = (value, top) => HEIGHT - BOTTOM - (value / top) * (HEIGHT - BOTTOM - TOP);
const one = (value) => value.toFixed(1);

function show(figure, svg, words, legend, says) {
  const old = figure.querySelector(".chart");
  const said = JSON.stringify([svg?.innerHTML ?? "", words, says]);
  if (figure.dataset.said === said) return;
  figure.dataset.said = said;
  const box = make("div", { class: "chart" });
  if (svg) {
    svg.setAttribute("aria-label", words);
    box.append(svg);
  }
  const list = make("ul", { class: "keys" }, ...legend.map(([mark, text]) => make("li", {}, make("i", { class: mark }), text)));
  box.append(says ? make("p", { class: "note" }, says) : list);
  if (old) old.replaceWith(box);
  else figure.append(box);
}

function axes(svg, top, from, to, words = number) {
  for (const value of [0, top / 2, top]) {
    const y = up(value, top);
    svg.append(makeSvg("line", { class: "grid", x1: LEFT, x2: WIDTH - 4, y1: y, y2: y }));
    svg.append(makeSvg("text", { x: LEFT - 4, y: y + 3, "text-anchor": "end" }, value === 0 ? "0" : words(value)));
  }
  svg.append(makeSvg("text", { x: LEFT, y: HEIGHT - 2 }, clock(from)));
  svg.append(makeSvg("text", { x: WIDTH - 4, y: HEIGHT - 2, "text-anchor": "end" }, clock(to)));
}

function niceTop(value) {
  if (!(value > 0)) return 1;
  const step = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((factor) => factor * step).find((top) => top >= value);
}

/** Tokens per second, one band on another for each version. `points`: `{at, rates}`, the oldest first. */
export function drawTokens(figure, points, why) {
  if (points.length < 2) return show(figure, null, "", [], why || "The first values come in some seconds.");
  const labels = [...new Set(points.flatMap((point) => Object.keys(point.rates)))];
  const made = labels.filter((label) => points.some((point) => point.rates[label] > 0));
  const own = (made.length ? made : labels).slice(-MAX_VERSIONS);
  const names = made.length > own.length ? ["others", ...own] : own;
  const value = (point, name) =>
    name !== "others"
      ? (point.rates[name] ?? 0)
      : Object.entries(point.rates).reduce((sum, [label, rate]) => sum + (own.includes(label) ? 0 : rate), 0);
  const totals = points.map((point) => Object.values(point.rates).reduce((sum, rate) => sum + rate, 0));
  const top = niceTop(Math.max(...totals));
  const [from, to] = [points[0].at, points.at(-1).at];
  const svg = plot();
  axes(svg, top, from, to);
  let below = points.map(() => 0);
  const keys = [];
  for (const name of names) {
    const above = points.map((point, at) => below[at] + value(point, name));
    const edge = (heights) => points.map((point, at) => `${one(across(point.at, from, to))},${one(up(heights[at], top))}`);
    // The colour of a version follows from its place among all, so that it stays when a new one comes.
    const mark = name === "others" ? "v-others" : `v${labels.indexOf(name) % 5}`;
    svg.append(makeSvg("polygon", { class: mark, points: [...edge(above), ...edge(below).reverse()].join(" ") }));
    keys.unshift([mark, `${name}: ${number(value(points.at(-1), name))}/s`]);
    below = above;
  }
  return show(figure, svg, `Tokens per second now: ${keys.map(([, text]) => text).join(", ")}`, keys, "");
}

/** Staleness. `points`: `{at, lag, mean}`: of the last worker, and of the choices that ended; null where not known. */
export function drawStaleness(figure, points) {
  if (points.length < 2) return show(figure, null, "", [], "The first values come in some seconds.");
  const top = Math.max(2, niceTop(Math.max(...points.map((point) => Math.max(point.lag ?? 0, point.mean ?? 0)))));
  const [from, to] = [points[0].at, points.at(-1).at];
  const svg = plot();
  axes(svg, top, from, to);
  for (const name of ["lag", "mean"]) {
    const known = points.filter((point) => point[name] !== null);
    const corners = known.map((point) => `${one(across(point.at, from, to))},${one(up(point[name], top))}`);
    svg.append(makeSvg("polyline", { class: `line ${name}`, points: corners.join(" ") }));
  }
  const mean = points.findLast((point) => point.mean !== null)?.mean ?? null;
  const keys = [
    ["lag", `last worker: ${points.at(-1).lag ?? "not known"}`],
    ["mean", mean === null ? "finished choices: none yet" : `finished choices, mean: ${mean.toFixed(2)}`],
  ];
  return show(figure, svg, `Versions behind: ${keys.map(([, text]) => text).join(", ")}`, keys, "");
}

const FLOOR = 1e-8; // a smaller difference, also 0, stands on the ground
const DECADES = 9; // up to 10

/** The canary of each update, on a scale of powers of ten. `found`: as `canaries` makes them. */
export function drawCanaries(figure, found) {
  const shown = found.slice(-60);
  if (!shown.length) return show(figure, null, "", [], "No update had a canary yet.");
  const svg = plot();
  const height = (value) => up(Math.min(DECADES, Math.max(0, Math.log10(Math.max(value, FLOOR) / FLOOR))), DECADES);
  for (const power of [-8, -5, -2, 1]) {
    const y = height(10 ** power);
    svg.append(makeSvg("line", { class: "grid", x1: LEFT, x2: WIDTH - 4, y1: y, y2: y }));
    svg.append(makeSvg("text", { x: LEFT - 4, y: y + 3, "text-anchor": "end" }, power === -8 ? "0" : `1e${power}`));
  }
  const tolerance = shown.at(-1).tolerance;
  if (tolerance) {
    const y = height(tolerance);
    svg.append(makeSvg("line", { class: "tolerance", x1: LEFT, x2: WIDTH - 4, y1: y, y2: y }));
  }
  shown.forEach((canary, at) => {
    const x = shown.length === 1 ? (LEFT + WIDTH) / 2 : across(at, -0.5, shown.length - 0.5);
    const bad = canary.failed > 0 || canary.action === "rollback";
    const y = height(canary.difference ?? (bad ? 10 : 0));
    const cross = `M${one(x - 3)} ${one(y - 3)}l6 6m0 -6l-6 6`;
    const words = `${canary.label}: ${small(canary.difference)}${bad ? `, ${canary.failed} failed` : ""}`;
    const mark = bad ? makeSvg("path", { class: "failed", d: cross }) : makeSvg("circle", { class: "passed", cx: one(x), cy: one(y), r: 2.5 });
    mark.append(makeSvg("title", {}, words));
    svg.append(mark);
  });
  svg.append(makeSvg("text", { x: LEFT, y: HEIGHT - 2 }, shown[0].label.slice(0, 20)));
  if (shown.length > 1) {
    svg.append(makeSvg("text", { x: WIDTH - 4, y: HEIGHT - 2, "text-anchor": "end" }, shown.at(-1).label.slice(0, 20)));
  }
  const failures = shown.filter((canary) => canary.failed > 0).length;
  const keys = [
    ["passed", `last: ${small(shown.at(-1).difference)}`],
    ["failed", `updates with a failure: ${failures}`],
    ["tolerance", `tolerance: ${small(tolerance)}`],
  ];
  return show(figure, svg, keys.map(([, text]) => text).join(", "), keys, "");
}
