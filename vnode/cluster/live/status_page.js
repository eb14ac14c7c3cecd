"use strict";
// Turns snapshots of the scheduler into this document. Text of jobs enters it by `textContent` alone, never as HTML.
(() => {
const TOKEN = new URLSearchParams(location.search).get("token") || "";
const PALETTE = document.body.dataset.colours.split(" ");
const HOLDING = ["starting", "running", "resizing"];
const ACTIVE = [...HOLDING, "pending"];
const STATES = [...ACTIVE, "succeeded", "failed", "cancelled"];
const ENDED_SHOWN = 50;
const QUIET = 15;  // seconds without a sign of life, which comes every 5

const byId = (id) => document.getElementById(id);

// ---- Elements

function build(parent, tag, className = "", text = "") {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text) node.textContent = text;
  parent.append(node);
  return node;
}

function draw(parent, tag, attributes, text = "") {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text) node.textContent = text;
  parent.append(node);
  return node;
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function setClass(node, name) {
  if (node.className !== name) node.className = name;
}

function arrange(parent, nodes) {  // touches only what is out of place, so that the focus stays
  const wanted = new Set(nodes);
  for (const child of [...parent.children]) if (!wanted.has(child)) child.remove();
  nodes.forEach((node, i) => {
    if (parent.children[i] !== node) parent.insertBefore(node, parent.children[i] || null);
  });
}

// ---- Words

const two = (n) => String(n).padStart(2, "0");
const isNumber = (value) => typeof value === "number";

function duration(seconds) {
  const s = Math.max(0, Math.floor(seconds));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${two(s % 60)} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${two(Math.floor(s / 60) % 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor(s / 3600) % 24} h`;
}

const dayOf = (time) => new Date(time * 1000).toDateString();
const dateText = (time) => new Date(time * 1000).toLocaleDateString("en", {month: "short", day: "numeric"});

function clock(time, seconds = true) {
  const date = new Date(time * 1000);
  return `${two(date.getHours())}:${two(date.getMinutes())}${seconds ? ":" + two(date.getSeconds()) : ""}`;
}

const moment = (time) => (dayOf(time) === dayOf(now()) ? clock(time) : `${dateText(time)} ${clock(time, false)}`);

function numberText(value) {
  if (!isNumber(value)) return value === null || value === undefined ? "–" : String(value);
  if (Number.isInteger(value)) return String(value);
  return Math.abs(value) >= 1e-3 && Math.abs(value) < 1e6 ? String(+value.toPrecision(4)) : value.toExponential(2);
}

const isBad = (value) => ["nan", "inf", "-inf"].includes(value);

function rateText(value) {
  if (!isNumber(value)) return "–";
  return value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

function deviceText(names) {  // 0, 1, 2, 5 -> 0–2, 5
  const runs = [];
  for (const name of names) {
    const last = runs.at(-1);
    if (last && /^\d+$/.test(name) && Number(name) === Number(last.at(-1)) + 1) last.push(name);
    else runs.push([name]);
  }
  return runs.map((run) => (run.length > 2 ? `${run[0]}–${run.at(-1)}` : run.join(", "))).join(", ") || "–";
}

const quoted = (word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`);
const commandText = (command) => (Array.isArray(command) ? command.map(quoted).join(" ") : String(command));
const shortened = (text, most = 48) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
const nameOf = (job) => shortened(job.name || `job ${job.id}`);

function whyLine(job) {  // a traceback says most in its last line
  const lines = (job.why || "").split("\n").map((line) => line.trim()).filter(Boolean);
  return (job.state === "failed" ? lines.at(-1) : lines[0]) || "";
}

function asOnTerminal(text) {  // without colours; of a line that was written over, the last
  return text.replace(/\x1b\[[0-?]*[ -/]*[@-~]/g, "").replace(/\r+\n/g, "\n").replace(/^[^\n]*\r(?=[^\n])/gm, "");
}

// ---- Colours: the palette, then lighter, then darker

function mixed(colour, other, part) {
  return "#" + [1, 3, 5].map((i) => {
    const [a, b] = [colour, other].map((one) => parseInt(one.slice(i, i + 2), 16));
    return Math.round(a + (b - a) * part).toString(16).padStart(2, "0");
  }).join("");
}

const COLOURS = [
  ...PALETTE, ...PALETTE.map((one) => mixed(one, "#ffffff", 0.42)), ...PALETTE.map((one) => mixed(one, "#000000", 0.28)),
];

function inkOn(colour) {
  const [r, g, b] = [1, 3, 5].map((i) => (parseInt(colour.slice(i, i + 2), 16) / 255) ** 2.2);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.2 ? "#111418" : "#ffffff";
}

const colourOf = (id) => COLOURS[(places.get(id) ?? 0) % COLOURS.length];

// ---- What is known

let snapshot = null;      // the last one
let jobs = new Map();     // id -> job
let places = new Map();   // id -> place among all jobs, which its colour goes by
let live = false;
let ahead = 0;            // the scheduler's clock minus this one's, seconds
let heardAt = 0;          // by this clock
let triedAt = 0;          // by this clock: the last time that a connection was asked for
let frozenAt = 0;         // by the scheduler's, since it does not answer

const here = () => Date.now() / 1000;
const now = () => (live ? here() + ahead : frozenAt);

function take(data) {
  snapshot = data;
  jobs = new Map(data.jobs.map((job) => [job.id, job]));
  places = new Map(data.jobs.map((job, i) => [job.id, /^\d+$/.test(job.id) ? Number(job.id) - 1 : i]));
}

// ---- The line of the cluster

const facts = new Map();

function showFact(name, text, className = "") {
  if (!facts.has(name)) {
    const box = build(byId("cluster"), "div");
    build(box, "dt", "", name);
    facts.set(name, {box, value: build(box, "dd")});
  }
  const {box, value} = facts.get(name);
  box.hidden = text === "";
  setText(value, text);
  setClass(value, className);
}

function showCluster() {
  const {devices, free, policy, began} = snapshot.cluster;
  const counts = Object.fromEntries(STATES.map((state) => [state, 0]));
  for (const job of snapshot.jobs) counts[job.state] += 1;
  showFact("policy", policy);
  showFact("devices in use", `${devices.length - free.length} of ${devices.length}`);
  for (const state of STATES) {
    const always = state === "running" || state === "pending";
    showFact(state, always || counts[state] ? String(counts[state]) : "", counts[state] ? state : "");
  }
  showFact("up for", duration(now() - began));
  document.title = `${counts.running + counts.resizing} running, ${counts.pending} pending · vnode cluster`;
}

// ---- Devices

const boxes = new Map();

function showDevices() {
  const {devices, free} = snapshot.cluster;
  const holder = new Map();
  for (const job of snapshot.jobs) for (const device of ACTIVE.includes(job.state) ? job.devices : []) holder.set(device, job);
  byId("devices").classList.toggle("many", devices.length > 48);
  for (const name of devices) {
    if (!boxes.has(name)) {
      const box = document.createElement("li");
      boxes.set(name, {box, title: build(box, "b", "", `device ${name}`), text: build(box, "span")});
    }
    const {box, text} = boxes.get(name);
    const job = holder.get(name);
    const words = job ? nameOf(job) : free.includes(name) ? "free" : "in use";
    setText(text, devices.length > 48 ? (job ? job.id : free.includes(name) ? "·" : "…") : words);
    setClass(box, job ? "" : free.includes(name) ? "free" : "leaving");
    const fill = job ? colourOf(job.id) : "";
    if (box.dataset.fill !== fill) {
      box.dataset.fill = fill;
      box.style.background = fill;
      box.style.color = fill && inkOn(fill);
    }
    const title = `device ${name}: ${job ? `job ${job.id} (${nameOf(job)})` : words}`;
    if (box.title !== title) box.title = title;
  }
  arrange(byId("devices"), devices.map((name) => boxes.get(name).box));
}

// ---- Shares over time

const LEFT = 34, RIGHT = 10, TOP = 20, BOTTOM = 24;
const UNITS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800];

function areasOf(history, start, x, right) {
  // Job -> its runs; a run -> steps {x, low, high} and its end. Several changes within one pixel count as one.
  const held = new Map(), runs = new Map(), open = new Map();
  let most = 0, i = 0;
  const stacked = (at) => {
    let level = 0;
    const order = [...held.keys()].sort((a, b) => (places.get(a) ?? -1) - (places.get(b) ?? -1));
    const upright = new Set(order);
    for (const [job, run] of open) if (!upright.has(job)) { run.end = at; open.delete(job); }
    for (const job of order) {
      const low = level, high = level + held.get(job);
      level = high;
      let run = open.get(job);
      if (!run) {
        run = {steps: [], end: right};
        open.set(job, run);
        if (!runs.has(job)) runs.set(job, []);
        runs.get(job).push(run);
      }
      const last = run.steps.at(-1);
      if (!last || last.low !== low || last.high !== high) run.steps.push({x: at, low, high});
    }
    most = Math.max(most, level);
  };
  const apply = (entry) => (entry.devices > 0 ? held.set(entry.job, entry.devices) : held.delete(entry.job));
  while (i < history.length && history[i].time <= start) apply(history[i++]);
  stacked(x(start));
  while (i < history.length) {
    const pixel = Math.min(right, Math.round(x(history[i].time)));
    while (i < history.length && Math.min(right, Math.round(x(history[i].time))) === pixel) apply(history[i++]);
    stacked(pixel);
  }
  return {runs, most};
}

function pathOf(run, y) {
  const path = [];
  run.steps.forEach((step, i) => {
    path.push(i ? `V${y(step.high)}` : `M${step.x} ${y(step.high)}`, `H${(run.steps[i + 1] || {x: run.end}).x}`);
  });
  for (let i = run.steps.length - 1; i >= 0; i -= 1) path.push(`V${y(run.steps[i].low)}`, `H${run.steps[i].x}`);
  return path.join("") + "Z";
}

function timeTicks(start, end, most) {
  const unit = UNITS.find((one) => (end - start) / one <= most) || 604800 * Math.ceil((end - start) / most / 604800);
  const shift = new Date(start * 1000).getTimezoneOffset() * 60;  // so that hours and days are those of the clock here
  const ticks = [];
  for (let t = Math.ceil((start - shift) / unit) * unit + shift; t <= end; t += unit) ticks.push(t);
  const text = (t) => {
    if (unit >= 86400 || (unit >= 3600 && clock(t, false) === "00:00")) return dateText(t);
    return clock(t, unit < 60);
  };
  return ticks.map((t) => [t, text(t)]);
}

function showShares() {
  const box = byId("shares");
  box.classList.toggle("tall", snapshot.cluster.devices.length > 16);
  const width = Math.max(260, box.clientWidth), height = box.clientHeight;
  const history = snapshot.history, total = snapshot.cluster.devices.length, end = now();
  const first = history.length ? history[0].time : snapshot.cluster.began;
  const start = Math.min(end, Math.max(end - Number(byId("window").value), Math.min(first, end)));
  const last = Math.max(end, start + 60);
  const right = width - RIGHT, base = height - BOTTOM;
  const x = (t) => LEFT + (right - LEFT) * (t - start) / (last - start);
  const {runs, most} = areasOf(history, start, x, Math.round(x(end)));
  const top = Math.max(total, most, 1);
  const y = (n) => +(base - (base - TOP) * n / top).toFixed(1);

  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const held = [...runs.keys()].sort((a, b) => (places.get(a) ?? -1) - (places.get(b) ?? -1));
  const label = held.length ? `Devices held by ${held.length} jobs from ${moment(start)} to ${moment(end)}` : "No job has held a device";
  for (const [name, value] of Object.entries({width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label})) {
    svg.setAttribute(name, value);
  }
  const step = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000].find((one) => top / one <= 6) || Math.ceil(top / 6);
  for (let n = 0; n <= top; n += step) {
    draw(svg, "line", {class: n ? "grid" : "axis", x1: LEFT, x2: right, y1: y(n), y2: y(n)});
    draw(svg, "text", {x: LEFT - 6, y: y(n) + 4, "text-anchor": "end"}, String(n));
  }
  for (const [t, text] of timeTicks(start, last, Math.max(2, Math.floor((right - LEFT) / 78)))) {
    draw(svg, "line", {class: "axis", x1: x(t), x2: x(t), y1: base, y2: base + 4});
    if (x(t) > LEFT + 4 && x(t) < right - 16) draw(svg, "text", {x: x(t), y: base + 18, "text-anchor": "middle"}, text);
  }
  for (const id of held) {
    const job = jobs.get(id), name = job ? nameOf(job) : `job ${id}`, fill = colourOf(id);
    const area = draw(svg, "path", {class: "area", fill, d: runs.get(id).map((run) => pathOf(run, y)).join("")});
    draw(area, "title", {}, `job ${id} (${name})`);
    let best = null;
    for (const run of runs.get(id)) {
      run.steps.forEach((one, i) => {
        const room = (run.steps[i + 1] || {x: run.end}).x - one.x;
        if (y(one.low) - y(one.high) >= 14 && (!best || room > best.room)) best = {...one, room};
      });
    }
    const text = best && [name, id].find((words) => words.length * 7.4 + 8 <= best.room);
    if (text) {
      const middle = {x: best.x + best.room / 2, y: (y(best.low) + y(best.high)) / 2 + 4};
      draw(svg, "text", {class: "name", ...middle, "text-anchor": "middle"}, text).style.fill = inkOn(fill);
    }
  }
  draw(svg, "path", {class: "total", d: `M${LEFT} ${y(total)}H${right}`});
  draw(svg, "text", {class: "total-name", x: right, y: y(total) - 6, "text-anchor": "end"}, total === 1 ? "1 device" : `${total} devices`);
  if (!held.length) {
    draw(svg, "text", {class: "nothing", x: (LEFT + right) / 2, y: (TOP + base) / 2, "text-anchor": "middle"}, "No job has held a device in this time.");
  }
  box.replaceChildren(svg);
  showLegend(held);
}

const keys = new Map();

function showLegend(held) {
  const shown = held.slice().reverse();  // as they lie, the top first
  for (const id of keys.keys()) if (!shown.includes(id)) keys.delete(id);
  for (const id of shown) {
    if (!keys.has(id)) {
      const key = document.createElement("li");
      keys.set(id, {key, swatch: build(key, "i", "swatch"), text: build(key, "span")});
    }
    const {swatch, text} = keys.get(id), job = jobs.get(id);
    swatch.style.background = colourOf(id);
    setText(text, `${id} ${job ? nameOf(job) : ""}`);
  }
  arrange(byId("legend"), shown.map((id) => keys.get(id).key));
}

// ---- Decisions

let decided = "";

function showDecisions() {
  const list = snapshot.decisions, last = list.at(-1);
  const state = last ? `${list.length} ${JSON.stringify(last)}` : "none";
  if (state === decided) return;
  decided = state;
  const lines = list.slice().reverse().map((decision) => {
    const line = document.createElement("li");
    build(line, "time", "", moment(decision.time)).title = new Date(decision.time * 1000).toLocaleString();
    build(line, "i", "swatch").style.background = colourOf(decision.job);
    const job = jobs.get(decision.job);
    const who = `job ${decision.job}${job && job.name ? ` (${nameOf(job)})` : ""}`;
    build(line, "span", "", `${who}: ${decision.why || `${decision.from} -> ${decision.to}`}`);
    return line;
  });
  byId("decisions").replaceChildren(...lines);
  if (!lines.length) build(byId("decisions"), "li", "empty", "No decisions yet.");
}

// ---- Jobs

function timeText(job) {
  if (job.ended !== null) {
    return job.started === null ? [duration(job.ended - job.submitted), "waited"] : [duration(job.ended - job.started), ""];
  }
  return job.started === null ? [duration(now() - job.submitted), "waiting"] : [duration(now() - job.started), ""];
}

function showTime(cell, job) {
  const [text, small] = timeText(job);
  setText(cell.text, text);
  setText(cell.small, small);
}

function shareText(job) {
  const [least, most] = job.workers;
  const of = job.rigid || least === most ? `${most}` : `${least}–${most}`;
  return ACTIVE.includes(job.state) ? `${job.share} of ${of}` : of;
}

function metricTexts(job) {
  return Object.entries(job.metrics || {}).map(([name, value]) => [`${name} ${numberText(value)}`, isBad(value)]);
}

function showMetrics(cell, job) {
  const texts = metricTexts(job);
  setText(cell.text, texts.length ? texts[0][0] : "–");
  setText(cell.small, texts.slice(1).map(([words]) => words).join(", "));
  setClass(cell.td, texts.some(([, bad]) => bad) ? "c-metrics bad" : "c-metrics");
}

function showProgress(cell, job) {
  const known = isNumber(job.step) && isNumber(job.steps) && job.steps > 0;
  const steps = isNumber(job.steps) ? ` / ${job.steps}` : "";
  setText(cell.text, isNumber(job.step) ? `${job.step}${steps}` : "–");
  cell.bar.hidden = !known;
  cell.fill.style.width = known ? `${Math.min(100, 100 * job.step / job.steps).toFixed(1)}%` : "0";
  cell.fill.style.background = colourOf(job.id);
}

function showState(cell, job) {
  const code = job.state === "failed" && job.code !== null ? ` (${job.code})` : "";
  setText(cell.text, job.state + code);
  setClass(cell.text, `state ${job.state}`);
}

function showShare(cell, job) {
  setText(cell.text, shareText(job));
  const growing = HOLDING.includes(job.state) && isNumber(job.training) && job.training !== job.share;
  setText(cell.small, growing ? `${job.training} training` : job.rigid ? "fixed" : "");
}

const plain = (words) => (cell, job) => setText(cell.text, words(job));

const COLUMNS = {
  job: ["Job", null],
  state: ["State", showState],
  priority: ["Priority", plain((job) => numberText(job.priority)), "number"],
  share: ["Share", showShare],
  devices: ["Devices", plain((job) => deviceText(job.devices))],
  progress: ["Step", showProgress],
  rate: ["Steps/s", plain((job) => rateText(job.steps_per_second)), "number"],
  metrics: ["Metrics", showMetrics],
  time: ["Time", showTime],
  end: ["Ended", plain((job) => (job.ended === null ? "–" : moment(job.ended)))],
  why: ["Why", plain(whyLine)],
};

class Detail {  // what a job's row shows below it once it is clicked
  constructor(columns, id) {
    this.id = id;
    this.stream = "out";
    this.row = document.createElement("tr");
    this.row.className = "detail";
    this.row.id = `detail-${places.get(id)}`;
    const cell = build(this.row, "td");
    cell.colSpan = columns;
    this.list = build(cell, "dl");
    this.values = new Map();
    const tabs = build(cell, "div", "tabs");
    this.tabs = [["out", "Output"], ["err", "Errors"]].map(([stream, words]) => {
      const tab = build(tabs, "button", "", words);
      tab.type = "button";
      tab.addEventListener("click", () => { this.stream = stream; this.fetched = ""; this.refresh(); });
      return [stream, tab];
    });
    this.output = build(cell, "pre", "", "…");
    this.output.tabIndex = 0;
    this.refresh();
  }

  fact(name, text, className = "") {
    if (!this.values.has(name)) this.values.set(name, [build(this.list, "dt", "", name), build(this.list, "dd", className)]);
    for (const node of this.values.get(name)) node.hidden = !text;
    setText(this.values.get(name)[1], text);
  }

  update(job) {
    const left = isNumber(job.step) && isNumber(job.steps) && job.steps_per_second > 0 && ACTIVE.includes(job.state);
    this.fact("Why", job.why || "", "why");
    this.fact("Name", (job.name || "").length > 24 ? job.name : "");
    this.fact("Command", commandText(job.command));
    this.fact("Folder", job.folder);
    this.fact("Devices", job.devices.join(", "));
    this.fact("Metrics", metricTexts(job).map(([words]) => words).join(", "));
    this.fact("Left", left ? `about ${duration((job.steps - job.step) / job.steps_per_second)} at this speed` : "");
    this.fact("Submitted", moment(job.submitted));
    this.fact("Started", job.started === null ? "" : `${moment(job.started)}, after ${duration(job.started - job.submitted)}`);
    this.fact("Ended", job.ended === null ? "" : `${moment(job.ended)}${job.code === null ? "" : `, exit code ${job.code}`}`);
    for (const [stream, tab] of this.tabs) tab.setAttribute("aria-pressed", String(stream === this.stream));
  }

  async refresh() {
    const stream = this.stream;
    for (const [one, tab] of this.tabs) tab.setAttribute("aria-pressed", String(one === stream));
    this.output.setAttribute("aria-label", stream === "out" ? "Last lines of the output" : "Last lines of the errors");
    let text;
    try {
      const answer = await fetch(`logs/${encodeURIComponent(this.id)}?stream=${stream}`, {headers: {Authorization: `Bearer ${TOKEN}`}});
      text = answer.ok ? asOnTerminal(await answer.text()) || "Nothing was written yet." : await answer.text();
    } catch {
      return;  // the line at the top says that the scheduler does not answer
    }
    if (stream !== this.stream || text === this.fetched) return;
    const {output} = this;
    const atEnd = !this.fetched || output.scrollHeight - output.scrollTop - output.clientHeight < 10;
    this.fetched = text;
    output.textContent = text;
    if (atEnd) output.scrollTop = output.scrollHeight;
  }
}

class Row {
  constructor(columns, id) {
    this.id = id;
    this.columns = columns;
    this.detail = null;
    this.cells = new Map();
    this.row = document.createElement("tr");
    this.row.className = "job";
    for (const key of columns) {
      const [label, , kind] = COLUMNS[key];
      const td = build(this.row, "td", `c-${key}${kind ? ` ${kind}` : ""}`);
      td.dataset.label = label;
      const cell = {td};
      if (key === "job") {
        cell.button = build(td, "button", "who");
        cell.button.type = "button";
        cell.button.setAttribute("aria-expanded", "false");
        cell.swatch = build(cell.button, "i", "swatch");
        build(cell.button, "span", "id", id);
        cell.text = build(cell.button, "span", "name");
      } else {
        cell.text = build(td, "span");
        if (["share", "metrics", "time"].includes(key)) cell.small = build(td, "small");
        if (key === "progress") {
          cell.bar = build(td, "span", "bar");
          cell.fill = build(cell.bar, "i");
        }
      }
      this.cells.set(key, cell);
    }
    this.row.addEventListener("click", () => { if (!String(getSelection())) this.toggle(); });
  }

  toggle() {
    const {button} = this.cells.get("job");
    if (this.detail) {
      this.detail.row.remove();
      this.detail = null;
      button.removeAttribute("aria-controls");
    } else {
      this.detail = new Detail(this.columns.length, this.id);
      this.row.after(this.detail.row);
      button.setAttribute("aria-controls", this.detail.row.id);
    }
    button.setAttribute("aria-expanded", String(Boolean(this.detail)));
    this.update(jobs.get(this.id));
  }

  update(job) {
    for (const [key, cell] of this.cells) {
      if (key === "job") {
        setText(cell.text, nameOf(job));
        cell.swatch.style.background = colourOf(job.id);
      } else {
        COLUMNS[key][1](cell, job);
        const words = cell.text.textContent;
        cell.td.classList.toggle("none", words === "–" || !words);
        const title = [words, cell.small ? cell.small.textContent : ""].filter(Boolean).join(", ");
        if (["why", "metrics", "devices"].includes(key) && cell.td.title !== title) cell.td.title = title;
      }
    }
    if (this.detail) this.detail.update(job);
  }
}

class Table {
  constructor(place, columns, caption) {
    this.columns = columns;
    this.rows = new Map();
    this.table = build(place, "table");
    this.table.setAttribute("aria-label", caption);
    const group = build(this.table, "colgroup");
    for (const key of columns) build(group, "col", `c-${key}`);
    const head = build(build(this.table, "thead"), "tr");
    for (const key of columns) {
      const [label, , kind] = COLUMNS[key];
      build(head, "th", `c-${key}${kind ? ` ${kind}` : ""}`, label).scope = "col";
    }
    this.body = build(this.table, "tbody");
  }

  show(list) {
    const wanted = new Set(list.map((job) => job.id));
    for (const id of this.rows.keys()) if (!wanted.has(id)) this.rows.delete(id);
    for (const job of list) {
      if (!this.rows.has(job.id)) this.rows.set(job.id, new Row(this.columns, job.id));
      this.rows.get(job.id).update(job);
    }
    const rows = list.map((job) => this.rows.get(job.id));
    arrange(this.body, rows.flatMap((row) => (row.detail ? [row.row, row.detail.row] : [row.row])));
    this.table.hidden = !list.length;
  }

  get details() {
    return [...this.rows.values()].map((row) => row.detail).filter(Boolean);
  }
}

const active = new Table(
  byId("active"), ["job", "state", "priority", "share", "devices", "progress", "rate", "metrics", "time", "why"], "Jobs that run or wait",
);
const ended = new Table(byId("ended"), ["job", "state", "priority", "share", "progress", "metrics", "time", "end", "why"], "Jobs that ended");

function showJobs() {
  const holding = snapshot.jobs.filter((job) => HOLDING.includes(job.state));
  const pending = snapshot.jobs.filter((job) => job.state === "pending");
  const past = snapshot.jobs.filter((job) => !ACTIVE.includes(job.state)).sort((a, b) => b.ended - a.ended);
  const read = active.details.map((detail) => detail.id);  // whose details are open stays in sight when it ends
  active.show([...holding, ...pending]);
  byId("no-jobs").hidden = holding.length + pending.length > 0;
  byId("ended-section").hidden = !past.length;
  const shown = past.slice(0, ENDED_SHOWN);
  setText(byId("ended-title"), past.length > ENDED_SHOWN ? `Ended: ${past.length} (the last ${ENDED_SHOWN} are listed)` : `Ended: ${past.length}`);
  const justEnded = shown.filter((job) => read.includes(job.id));
  if (justEnded.length) byId("ended-section").open = true;
  if (byId("ended-section").open) ended.show(shown);
  for (const job of justEnded) if (!ended.rows.get(job.id).detail) ended.rows.get(job.id).toggle();
}

byId("ended-section").addEventListener("toggle", () => { if (snapshot) showJobs(); });

// ---- Updates

let drawn = "", queued = false;

function show() {
  queued = false;
  if (!snapshot) return;
  showCluster();
  showDevices();
  showDecisions();
  showJobs();
  const {history} = snapshot;
  const state = `${history.length} ${JSON.stringify(history.at(-1))} ${snapshot.cluster.devices.length}`;
  if (state !== drawn) showShares();
  drawn = state;
}

function queueShow() {
  if (!queued) requestAnimationFrame(show);
  queued = true;
}

function tick() {
  if (document.hidden) return;
  if (live && here() - Math.max(heardAt, triedAt) > QUIET) {
    lose();
    connect();
  }
  if (!snapshot || !live) return;
  queueShow();
  if (!byId("shares").matches(":hover")) showShares();  // a picture that is read stays as it is
}

function refreshOutput() {
  if (!live || document.hidden) return;
  const tables = byId("ended-section").open ? [active, ended] : [active];
  for (const detail of tables.flatMap((table) => table.details)) detail.refresh();
}

byId("window").addEventListener("change", () => { if (snapshot) showShares(); });
new ResizeObserver(() => { if (snapshot) showShares(); }).observe(byId("shares"));
setInterval(tick, 1000);
setInterval(refreshOutput, 2000);

// ---- The connection

let events = null, retry = 0;

function say(kind, words) {
  setClass(byId("connection"), kind);
  setText(byId("connection"), words);
}

function hear(time) {
  heardAt = here();
  ahead = time - heardAt;
  live = true;
  say("live", "live");
}

function lose(words = "The scheduler does not answer.") {
  if (live) frozenAt = heardAt + ahead;
  live = false;
  say("lost", frozenAt ? `${words} This is how it was at ${clock(frozenAt)}.` : words);
}

function connect() {
  clearTimeout(retry);
  if (events) events.close();
  triedAt = here();
  events = new EventSource(`events?token=${encodeURIComponent(TOKEN)}`);
  events.addEventListener("message", (event) => {
    const data = JSON.parse(event.data);
    hear(data.cluster.now);
    take(data);
    queueShow();
  });
  events.addEventListener("alive", (event) => hear(Number(event.data)));
  events.addEventListener("trouble", (event) => lose(`The scheduler's state cannot be read: ${JSON.parse(event.data).trouble}.`));
  events.addEventListener("error", async () => {
    lose();
    if (events.readyState !== EventSource.CLOSED) return;  // it tries again by itself
    retry = setTimeout(connect, 3000);
    const answer = await fetch("snapshot", {headers: {Authorization: `Bearer ${TOKEN}`}}).catch(() => null);
    if (answer && answer.status === 401) lose("The scheduler was started anew: open the address that it printed then.");
  });
}

document.addEventListener("visibilitychange", () => {  // a page that nobody sees asks for nothing
  if (document.hidden) {
    clearTimeout(retry);
    events.close();
  } else {
    connect();
  }
});
connect();
})();
