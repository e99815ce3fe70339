"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const rounds = data.rounds;
const $ = (id) => document.getElementById(id);
let selected = -1;

// Building blocks

function element(namespace, tag, attributes = {}, ...children) {
  const node = document.createElementNS(namespace, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}
const html = (...args) => element(document.body.namespaceURI, ...args);
const svg = (...args) => element($("tree").namespaceURI, ...args);

const fixed = (x, digits) => (x === null ? "–" : x.toFixed(digits).replace("-", "−"));
const percent = (x) => `${fixed(100 * x, x < 0.1 ? 1 : 0)} %`;
const probability = (lp) => (lp === null ? "–" : lp < -6.9 ? Math.exp(lp).toExponential(1) : fixed(Math.exp(lp), 3));
const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
const peak = (name) => Math.max(...rounds.map((round) => round[name]));
const mean = (name) => sum(rounds.map((round) => round[name])) / rounds.length;
const plural = (n, noun) => `${n} ${noun}${n === 1 ? "" : "s"}`;

function duration(seconds) {
  if (seconds >= 1) return `${fixed(seconds, 2)} s`;
  return seconds >= 1e-3 ? `${fixed(seconds * 1e3, 1)} ms` : `${fixed(seconds * 1e6, 0)} µs`;
}

// A token's text as [string, isMark] pieces: whitespace and invisible characters become marks.
const GLYPHS = { " ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍" };
function visible(token, limit = 40) {
  const pieces = [];
  for (const run of data.vocab[token].match(/[\p{C}\p{Z}]+|[^\p{C}\p{Z}]+/gu) ?? []) {
    const mark = /[\p{C}\p{Z}]/u.test(run);
    const marked = () => [...run].map((c) => GLYPHS[c] ?? `⟨${c.codePointAt(0).toString(16).toUpperCase()}⟩`).join("");
    const shown = [...(mark ? marked().replace(/(.)\1{4,}/g, (same, c) => `${c}×${same.length}`) : run)];
    pieces.push([shown.slice(0, limit).join(""), mark]);
    limit -= shown.length;
    if (limit < 0) return [...pieces, ["…", true]];
  }
  return pieces.length ? pieces : [[`#${token}`, true]];
}
const plain = (token) => visible(token).map(([s]) => s).join("");

function figures(id, entries) {
  $(id).replaceChildren(...entries.map(([name, value]) => html("div", {}, html("dt", {}, name), html("dd", {}, value))));
}

function stages(id, seconds) {
  const total = sum(Object.values(seconds)) || 1;
  $(id).replaceChildren(...Object.entries(seconds).flatMap(([name, s]) => {
    const bar = html("b");
    bar.style.width = `${(100 * s) / total}%`;
    return [html("span", {}, name), html("i", {}, bar), html("span", {}, duration(s)), html("span", {}, percent(s / total))];
  }));
}

function showTip(event, ...content) {
  const tip = $("tip");
  tip.replaceChildren(...content);
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const below = event.clientY + 18 + height < innerHeight;
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 12, innerWidth - width - 8))}px`;
  tip.style.top = `${below ? event.clientY + 18 : Math.max(4, event.clientY - height - 12)}px`;
}
const hideTip = () => ($("tip").hidden = true);

// The tree of a round

// Nodes with columns (depth) and rows. A first child continues its parent's row; any other starts the next row that is
// free over its whole run, deepest branches first. So no two edges cross, and no two vertical runs overlap.
function layout({ tokens, parents, scores, path, emitted }) {
  const nodes = tokens.map((token, slot) => ({ slot, token, score: scores[slot], children: [], depth: 0, kind: "rejected" }));
  for (const node of nodes.slice(1)) {
    node.parent = nodes[parents[node.slot]];
    node.parent.children.push(node);
    node.depth = node.parent.depth + 1;
    node.lp = node.score === null || node.parent.score === null ? null : Math.min(0, node.score - node.parent.score);
  }
  for (const node of nodes) node.children.sort((a, b) => b.score - a.score || a.slot - b.slot);
  path.forEach((slot, i) => Object.assign(nodes[slot], { kind: i ? "accepted" : "root", choice: emitted[i] }));
  const end = nodes[path.at(-1)];
  // A stop token or a limit may cut the path right before a drafted token that the target chose as well.
  const drafted = end.children.find((node) => node.token === end.choice);
  if (drafted) drafted.kind = "bonus";
  else {
    const bonus = { token: end.choice, parent: end, children: [], depth: end.depth + 1, kind: "bonus" };
    end.children.unshift(bonus);
    nodes.push(bonus);
  }
  const free = [];
  const place = (start) => {
    const run = [];
    for (let node = start; node; node = node.children[0]) run.push(node);
    const row = Math.max(...run.map((node) => free[node.depth] ?? 0));
    for (const node of run) {
      node.row = row;
      free[node.depth] = row + 1;
    }
    for (const node of run.reverse()) node.children.slice(1).forEach(place);
  };
  place(nodes[0]);
  return nodes;
}

const ROW = 27, BOX = 21, GAP = 26, TOP = 24, PAD = 8;
const measure = document.createElement("canvas").getContext("2d");

function drawTree(round) {
  const nodes = layout(round.trace);
  measure.font = `600 12px ${getComputedStyle($("text")).fontFamily}`;
  const widths = [];
  for (const node of nodes) {
    node.label = visible(node.token, 16);
    const width = measure.measureText(node.label.map(([s]) => s).join("")).width + 2 * PAD;
    widths[node.depth] = Math.max(widths[node.depth] ?? 32, Math.ceil(width));
  }
  const lefts = widths.map((_, d) => 1 + sum(widths.slice(0, d)) + d * GAP);
  const width = lefts.at(-1) + widths.at(-1) + 1;
  const height = TOP + ROW * (1 + Math.max(...nodes.map((node) => node.row)));
  const middle = (node) => TOP + ROW * node.row + BOX / 2;
  const edges = nodes.slice().sort((a, b) => (a.kind !== "rejected") - (b.kind !== "rejected")).filter((n) => n.parent);
  const tree = $("tree");
  for (const [name, value] of Object.entries({ width, height, viewBox: `0 0 ${width} ${height}` })) tree.setAttribute(name, value);
  tree.setAttribute("aria-label", `Draft tree: ${plural(round.slots, "slot")}, ${round.accepted} accepted`);
  tree.replaceChildren(
    ...lefts.map((x, d) => svg("text", { x, y: 11, class: "depth" }, d ? `+${d}` : "root")),
    ...edges.map((node) => {
      const [x0, x1] = [lefts[node.depth - 1] + widths[node.depth - 1], lefts[node.depth]];
      const [y0, y1, bend, r] = [middle(node.parent), middle(node), x1 - GAP / 2, 6];
      const turn = `H${bend - r}Q${bend} ${y0} ${bend} ${y0 + r}V${y1 - r}Q${bend} ${y1} ${bend + r} ${y1}`;
      return svg("path", { class: node.kind, d: `M${x0} ${y0}${y0 === y1 ? "" : turn}H${x1}` });
    }),
    ...nodes.map((node) => drawNode(node, lefts[node.depth], middle(node), widths[node.depth])),
  );
}

function drawNode(node, x, y, width) {
  const box = { x, y: y - BOX / 2, height: BOX, rx: node.slot === undefined ? BOX / 2 : 4 };
  const group = svg("g", { class: node.kind }, svg("rect", { ...box, width, class: "box" }));
  if (node.lp != null) {
    const inner = { x: x + 1, y: box.y + 1, height: BOX - 2, rx: 3, width: (width - 2) * Math.exp(node.lp) };
    group.append(svg("rect", { ...inner, class: "fill" }));
  }
  const spans = node.label.map(([s, mark]) => svg("tspan", mark ? { class: "mark" } : {}, s));
  group.append(svg("text", { x: x + PAD, y: y + 4 }, ...spans));
  group.addEventListener("mousemove", (event) => showTip(event, html("b", {}, plain(node.token)), describe(node)));
  group.addEventListener("mouseleave", hideTip);
  return group;
}

function describe(node) {
  const lines = [`token ${node.token}` + (node.slot === undefined ? "" : ` · slot ${node.slot}`) + ` · depth ${node.depth}`];
  if (node.lp !== undefined) {
    lines.push(`given its parent: p ${probability(node.lp)}, log-prob ${fixed(node.lp, 3)}`);
    lines.push(`whole path: p ${probability(node.score)}, log-prob ${fixed(node.score, 3)}`);
  }
  lines.push({
    root: () => "root: the newest token when the round began",
    accepted: () => "accepted: the target chose it too",
    bonus: () => node.slot === undefined ? "bonus: chosen by the target, the next root" : "chosen by the target too; the path was cut here",
    rejected: () => node.parent.choice === undefined ? "rejected with its parent" : `rejected: the target chose ${plain(node.parent.choice)}`,
  }[node.kind]());
  return `\n${lines.join("\n")}`;
}

// The parts that are drawn once

function drawSummary() {
  const ended = { stop: "stopped", length: "reached the length limit", error: "failed" }[data.finish_reason] ?? "unfinished";
  const reason = data.error ?? data.stop_reason;
  $("outcome").textContent = `${ended}${reason === null ? "" : `: ${typeof reason === "number" ? `token ${reason}` : reason}`} · seed ${data.seed}`;
  $("outcome").classList.toggle("error", data.finish_reason === "error");
  const drafted = mean("slots") - 1;
  figures("figures", [
    ["output tokens", data.output_tokens], ["rounds", rounds.length], ["tokens / round", fixed(data.tokens_per_round, 2)],
    ["tokens / s", fixed(data.tokens_per_second, 1)], ["prompt tokens", data.prompt_tokens], ["expected / round", fixed(mean("expected"), 2)],
    ["of the draft accepted", drafted ? percent(mean("accepted") / drafted) : "–"], ["largest batch", peak("batch")], ["slots / round", fixed(mean("slots"), 1)],
  ]);
  stages("stages", data.stage_seconds);
  const counts = Array(peak("emitted")).fill(0);
  for (const round of rounds) counts[round.emitted - 1] += 1;
  $("histogram").setAttribute("aria-label", counts.map((n, i) => `${plural(i + 1, "token")}: ${plural(n, "round")}`).join(", "));
  $("histogram").append(...counts.map((n, i) => {
    const bar = html("i");
    bar.style.height = `${(72 * n) / Math.max(...counts)}%`;
    return html("div", {}, n ? `${n}` : "", bar, html("b", {}, `${i + 1}`));
  }));
}

function drawTimeline() {
  const [most, slots] = [peak("emitted"), peak("slots")];
  $("scale").textContent = `height: tokens emitted, up to ${most} · shade: slots, up to ${slots}`;
  $("timeline").classList.toggle("sparse", rounds.length <= 160);
  $("timeline").setAttribute("aria-valuemax", rounds.length);
  $("timeline").append(...rounds.map((round, i) => {
    const bar = html("b");
    bar.style.height = `${(100 * round.emitted) / most}%`;
    bar.style.opacity = 0.35 + (0.65 * Math.log2(round.slots)) / (Math.log2(slots) || 1);
    const column = html("i", {}, bar);
    const words = `round ${i + 1}: ${plural(round.emitted, "token")} from ${plural(round.slots, "slot")}`;
    column.addEventListener("mousemove", (event) => (event.buttons ? select(i) : showTip(event, words)));
    column.addEventListener("mousedown", () => select(i));
    return column;
  }));
  $("timeline").addEventListener("mouseleave", hideTip);
}

function drawText() {
  $("text").append(html("span", { class: "prompt" }, data.prompt), ...rounds.map((round, i) => {
    const lines = round.text.split("\n").flatMap((line, j) => (j ? [html("span", { class: "newline" }), `\n${line}`] : [line]));
    const span = html("a", {}, ...(round.text ? lines : [html("span", { class: "nothing" })]));
    span.addEventListener("click", () => select(i));
    return span;
  }));
}

// Selection

function select(i) {
  i = Math.max(0, Math.min(rounds.length - 1, i));
  if (i === selected) return;
  const round = rounds[i];
  const columns = $("timeline").children, spans = $("text").querySelectorAll("a");
  for (const node of [columns[selected], spans[selected]]) node?.removeAttribute("aria-current");
  for (const node of [columns[i], spans[i]]) node.setAttribute("aria-current", "true");
  spans.forEach((node, j) => node.classList.toggle("later", j > i));
  selected = i;
  $("text").scrollTop = spans[i].offsetTop - $("text").offsetTop - $("text").clientHeight / 2;
  $("timeline").setAttribute("aria-valuenow", i + 1);
  $("heading").textContent = `Round ${i + 1} of ${rounds.length}`;
  $("previous").disabled = i === 0;
  $("next").disabled = i === rounds.length - 1;
  const of = (n, all) => (n === all ? n : `${n} of ${all}`);
  figures("numbers", [
    ["slots", of(round.slots, round.padded_slots)], ["drafted, accepted", round.accepted], ["tokens expected", fixed(round.expected, 2)],
    ["tokens emitted", of(round.emitted, round.trace.emitted.length)], ["batch", round.batch], ["round time", duration(sum(Object.values(round.seconds)))],
  ]);
  stages("times", round.seconds);
  drawTree(round);
  history.replaceState(null, "", `#round=${i + 1}`);
}

const fromHash = () => select(Number(/^#round=(\d+)$/.exec(location.hash)?.[1] ?? 1) - 1);
const KEYS = { ArrowLeft: () => selected - 1, ArrowRight: () => selected + 1, Home: () => 0, End: () => rounds.length - 1 };

addEventListener("keydown", (event) => {
  if (!(event.key in KEYS) || event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  hideTip();
  select(KEYS[event.key]());
});
addEventListener("hashchange", fromHash);
$("previous").addEventListener("click", () => select(selected - 1));
$("next").addEventListener("click", () => select(selected + 1));
drawSummary();
drawTimeline();
drawText();
fromHash();
