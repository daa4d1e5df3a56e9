"use strict";
// Values that nodes report become text only: this script never sets innerHTML.

const POLL_MS = 1000, TIMEOUT_MS = 5000, SAMPLES = 60, SLOTS = 4096, RING_COLUMNS = 256, MAX_LATE = 8, LATE_SECONDS = 10;
const KINDS = {
  present: "good", running: "good", lost: "bad", failed: "bad", left: "muted", stopped: "muted",
};
const COLORS = [
  "#4a7fd0", "#e2a33d", "#cf6a87", "#35a08e", "#8d6cc4", "#8ba33c", "#5fb0dc", "#a9785a", "#7d8a97", "#d9825b",
];
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const $ = (id) => document.getElementById(id);
const kind = (state) => KINDS[state] ?? "warn";
const color = (rank) => COLORS[rank] ?? `hsl(${rank * 137.508 % 360} ${35 + rank % 3 * 12}% ${46 + rank % 4 * 6}%)`;
const isGone = (node) => node.state === "left" || node.state === "lost";

// ── numbers ──────────────────────────────────────────────────────────────────

const isNumber = (value) => typeof value === "number";

function scaled(count) {
  let unit = 0;
  while (Math.abs(count) >= 1024 && unit < UNITS.length - 1) { count /= 1024; unit += 1; }
  return [unit ? count.toFixed(1) : count.toFixed(0), UNITS[unit]];
}
const bytes = (count) => isNumber(count) ? scaled(count).join(" ") : "–";
const bytesRate = (count) => isNumber(count) ? `${bytes(count)}/s` : "–";
const whole = (count) => isNumber(count) ? count.toFixed(0) : "–";
const rate = (count) => isNumber(count) ? `${count.toFixed(1)}/s` : "–";
const percent = (part) => isNumber(part) ? `${(100 * part).toFixed(1)} %` : "–";
const seconds = (count) => isNumber(count) ? `${count.toFixed(1)} s` : "–";

function duration(count) {
  const [s, m, h] = [count % 60, count / 60 % 60, count / 3600].map(Math.floor);
  return h ? `${h} h ${m} min` : m ? `${m} min ${s} s` : `${s} s`;
}

// ── elements ─────────────────────────────────────────────────────────────────

function make(tag, className = "", text = "") {
  const element = document.createElement(tag);
  element.className = className;
  element.textContent = text;
  return element;
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function setClass(element, className) {
  if (element.className !== className) element.className = className;
}

/** One child of `parent` for each item. Existing children stay, so that a selection in them does. */
function fill(parent, items, create, update) {
  while (parent.children.length > items.length) parent.lastElementChild.remove();
  items.forEach((item, index) => {
    const child = parent.children[index] ?? parent.appendChild(create());
    update(child, item);
  });
}

function bar(part, className = "") {
  return { part: Math.min(Math.max(isNumber(part) ? part : 0, 0), 1), className };
}

function createCell(column) {
  const cell = make("td", column.isNumber ? "number" : "");
  cell.dataset.label = column.label;
  cell.append(make("span"), make("span", "also"), make("span", "bar"));
  cell.lastChild.append(make("i"));
  return cell;
}

function updateCell(cell, shown) {
  const [main, also, meter] = cell.children;
  if (shown.name) {
    if (main.children.length === 0) main.append(make("span"), make("span"));
    setClass(main, "name");
    const [mark, name] = main.children;
    setClass(mark, shown.color ? "swatch" : `dot ${shown.kind}`);
    mark.style.background = shown.color ?? "";
    setText(name, shown.name);
  } else {
    setText(main, shown.text ?? "");
    setClass(main, shown.kind ?? "");
  }
  also.hidden = !shown.also;
  setText(also, shown.also ?? "");
  meter.hidden = !shown.bar;
  if (shown.bar) {
    setClass(meter, `bar ${shown.bar.className}`);
    meter.firstChild.style.width = `${100 * shown.bar.part}%`;
  }
}

function showTable(table, columns, nodes) {
  const [head, body] = [table.tHead, table.tBodies[0]];
  if (!head.rows.length) {
    const row = head.insertRow();
    for (const column of columns) {
      row.append(make("th", column.isNumber ? "number" : "", column.label));
      row.lastChild.scope = "col";
    }
  }
  fill(body, nodes, () => {
    const row = make("tr");
    row.append(...columns.map(createCell));
    return row;
  }, (row, node) => {
    setClass(row, isGone(node) ? "gone" : "");
    columns.forEach((column, index) => updateCell(row.children[index], column.show(node)));
  });
}

// ── columns ──────────────────────────────────────────────────────────────────

const where = (node) => ({
  text: node.host,
  also: [`pid ${node.pid}`, node.address.replace("tcp://", "")].filter(Boolean).join(" · "),
});
const state = {
  label: "state", show: (node) => ({ text: node.state, kind: kind(node.state), also: `epoch ${node.epoch}` }),
};
const metrics = { label: "metrics", show: (node) => ({ text: node.metrics || "–" }) };
const silent = (lease) => ({
  label: "silent", isNumber: true,
  show: (node) => ({
    text: isGone(node) ? "–" : seconds(node.silent_seconds),
    kind: !isGone(node) && node.silent_seconds > lease / 2 ? "warn" : "",
  }),
});
const traffic = (label, name) => ({
  label, isNumber: true,
  show: (node) => ({ text: bytesRate(node.rates[name]), also: bytes(node.load[name]) }),
});
const rounds = {
  label: "rounds", isNumber: true,
  show: (node) => ({ text: rate(node.rates.rounds), also: whole(node.load.rounds) }),
};
const spent = (label, name, limit) => ({
  label, isNumber: true,
  show: (node) => {
    const part = node.rates[name];
    if (isGone(node)) return { text: "–", also: seconds(node.load[name]) };
    return { text: percent(part), also: seconds(node.load[name]), bar: bar(part, part > limit ? "warn" : "") };
  },
});

const serverColumns = (lease) => [
  { label: "server", show: (node) => ({ name: `server ${node.rank}`, color: color(node.rank) }) },
  { label: "host", show: where },
  state,
  {
    label: "slots", isNumber: true,
    show: (node) => ({ text: whole(node.slots), also: percent(node.slots / SLOTS) }),
  },
  traffic("received", "received_bytes"),
  traffic("sent", "sent_bytes"),
  rounds,
  spent("summing", "busy_seconds", 0.8),
  {
    label: "held of budget", isNumber: true,
    show: (node) => {
      if (isGone(node)) return { text: "–" };
      const part = node.load.held_bytes / node.load.budget_bytes;
      const also = isNumber(node.load.budget_bytes) ? `of ${bytes(node.load.budget_bytes)}` : "";
      return { text: bytes(node.load.held_bytes), also, bar: bar(part, part > 0.8 ? "warn" : "") };
    },
  },
  { label: "open rounds", isNumber: true, show: (node) => ({ text: isGone(node) ? "–" : whole(node.load.open_rounds) }) },
  silent(lease),
  metrics,
];

const workerColumns = (lease, stragglers) => [
  {
    label: "worker",
    show: (node) => ({ name: node.rank < 0 ? "worker" : `worker ${node.rank}`, kind: kind(node.state) }),
  },
  { label: "host", show: where },
  state,
  { label: "step", isNumber: true, show: (node) => ({ text: rate(node.rates.step), also: whole(node.load.step) }) },
  rounds,
  traffic("pushed", "pushed_bytes"),
  traffic("pulled", "pulled_bytes"),
  spent("waiting", "wait_seconds", 2),
  {
    label: "late", isNumber: true,
    show: (node) => ({
      text: seconds(node.late_seconds),
      kind: stragglers.includes(node.rank) ? "warn" : "",
      also: stragglers.includes(node.rank) ? "straggler" : "",
    }),
  },
  silent(lease),
  metrics,
];

// ── sections ─────────────────────────────────────────────────────────────────

const samples = { pushed_bytes: [], pulled_bytes: [], rounds: [], steps: [] };

function showThroughput(throughput) {
  for (const [name, series] of Object.entries(samples)) {
    const now = throughput[name] ?? 0;
    series.push(now);
    if (series.length > SAMPLES) series.shift();
    const [number, unit] = name.endsWith("_bytes") ? scaled(now) : [now.toFixed(1), ""];
    const value = $(name);
    if (value.children.length === 0) value.replaceChildren(make("span"), " ", make("small"));
    setText(value.firstChild, number);
    setText(value.lastChild, `${unit}/s`);
    const top = Math.max(...series) || 1, first = SAMPLES - series.length;
    const points = series.map((sample, index) => `${first + index},${(34 - 31 * sample / top).toFixed(2)}`);
    const trend = value.nextElementSibling;
    trend.querySelector("polyline").setAttribute("points", points.join(" "));
    trend.querySelector("polygon").setAttribute("points", `${first},36 ${points.join(" ")} ${SAMPLES - 1},36`);
  }
}

let drawn = null;
let owners = [];

function showRing(encoded) {
  if (encoded === drawn) return;
  drawn = encoded;
  const raw = Uint8Array.from(atob(encoded), (char) => char.charCodeAt(0));
  owners = Array.from({ length: raw.length / 2 }, (_, slot) => raw[2 * slot] + 256 * raw[2 * slot + 1]);
  const canvas = $("ring"), context = canvas.getContext("2d");
  context.clearRect(0, 0, canvas.width, canvas.height);
  owners.forEach((rank, slot) => {
    context.fillStyle = color(rank);
    context.fillRect(slot % RING_COLUMNS, Math.floor(slot / RING_COLUMNS), 1, 1);
  });
  const counts = new Map();
  for (const rank of owners) counts.set(rank, (counts.get(rank) ?? 0) + 1);
  const shares = [...counts].sort((a, b) => a[0] - b[0]);
  setText($("ring-note"), owners.length
    ? `${owners.length} slots, coloured by the server that owns it`
    : "no ring yet: not all nodes have registered");
  canvas.setAttribute("aria-label", shares.map(([rank, count]) => `server ${rank} owns ${count} slots`).join(", "));
  fill($("shares"), shares, () => {
    const item = make("li");
    item.append(make("span", "swatch"), make("span"), make("span", "muted"));
    return item;
  }, (item, [rank, count]) => {
    item.children[0].style.background = color(rank);
    setText(item.children[1], `server ${rank}`);
    setText(item.children[2], `${count} · ${percent(count / owners.length)}`);
  });
}

$("ring").addEventListener("mousemove", (event) => {
  const box = event.target.getBoundingClientRect();
  const column = Math.floor((event.clientX - box.left) / box.width * RING_COLUMNS);
  const row = Math.floor((event.clientY - box.top) / box.height * event.target.height);
  const slot = row * RING_COLUMNS + column;
  event.target.title = slot in owners ? `slot ${slot}: server ${owners[slot]}` : "";
});

function showLate(workers, stragglers) {
  const late = workers.filter((node) => node.late_seconds > 0)
    .sort((a, b) => b.late_seconds - a.late_seconds).slice(0, MAX_LATE);
  setText($("late-note"), stragglers.length ? "the others wait for these much longer than for most"
    : late.length ? "none: no worker is much later than most" : "none: no worker has kept the others waiting");
  const top = Math.max(LATE_SECONDS, ...late.map((node) => node.late_seconds));
  fill($("late"), late, () => {
    const item = make("li"), meter = make("span", "bar");
    meter.append(make("i"));
    item.append(make("span"), make("span"), meter);
    return item;
  }, (item, node) => {
    const isStraggler = stragglers.includes(node.rank);
    setClass(item, isStraggler ? "warn" : "");
    setText(item.children[0], `the others have waited for worker ${node.rank}`);
    setText(item.children[1], seconds(node.late_seconds));
    setClass(item.children[2], `bar ${isStraggler ? "warn" : ""}`);
    item.children[2].firstChild.style.width = `${100 * node.late_seconds / top}%`;
  });
}

function showChanges(changes) {
  fill($("changes"), changes, () => {
    const item = make("li");
    item.append(make("time", "muted"), make("span"), make("span"));
    return item;
  }, (item, change) => {
    const at = new Date(Date.now() - 1000 * change.seconds_ago);
    setText(item.children[0], at.toLocaleTimeString([], { hour12: false }));
    setText(item.children[1], change.who);
    setText(item.children[2], `${change.state}${change.who === "job" ? `, epoch ${change.epoch}` : ""}`);
    setClass(item.children[2], kind(change.state));
  });
}

function showFacts(list, facts) {
  fill(list, facts.flatMap(([name, value]) => [["dt", name], ["dd", value]]), () =>
    make(list.children.length % 2 ? "dd" : "dt"), (element, [, text]) => setText(element, String(text)));
}

function count(nodes) {
  const states = new Map();
  for (const node of nodes) states.set(node.state, (states.get(node.state) ?? 0) + 1);
  return [...states].map(([name, number]) => `${number} ${name}`).join(", ") || "none yet";
}

// ── the loop ─────────────────────────────────────────────────────────────────

function setState(text, className) {
  setText($("state-text"), text);
  setClass($("state"), `pill ${className}`);
}

function show(status) {
  const of = (role) => status.nodes.filter((node) => node.role === role);
  const [servers, workers, [scheduler]] = [of("server"), of("worker"), of("scheduler")];
  document.title = `${status.job}: ${status.state} · ZenPS`;
  setText($("job"), status.job);
  setState(status.state, kind(status.state));
  setText($("epoch"), String(status.epoch));
  setText($("uptime"), duration(status.uptime_seconds));
  setText($("lease"), `${status.lease_seconds} s`);
  setText($("updated"), new Date().toLocaleTimeString([], { hour12: false }));
  showThroughput(status.throughput);
  showRing(status.owners);
  showTable($("servers"), serverColumns(status.lease_seconds), servers);
  setText($("servers-note"), count(servers));
  showTable($("workers"), workerColumns(status.lease_seconds, status.stragglers), workers);
  setText($("workers-note"), count(workers));
  $("stall").hidden = !status.stall;
  setText($("stall"), `the workers wait for one another: ${status.stall}`);
  showLate(workers, status.stragglers);
  showChanges(status.changes);
  showFacts($("scheduler"), [
    ["host", scheduler.host], ["pid", scheduler.pid], ["address", scheduler.address],
    ["metrics", scheduler.metrics || "off"], ["up", duration(status.uptime_seconds)],
  ]);
  showFacts($("settings"), Object.entries(status.settings).map(([name, value]) =>
    [name, name.endsWith("_bytes") ? bytes(value) : value]));
}

let since = null;

async function poll() {
  try {
    const answer = await fetch("status.json", { cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
    if (!answer.ok) throw new Error(`HTTP ${answer.status}`);
    show(await answer.json());
    since = null;
    $("alert").hidden = true;
  } catch {
    since ??= new Date().toLocaleTimeString([], { hour12: false });
    setState("no answer", "bad");
    setText($("alert"), `The scheduler has not answered since ${since}: the job may have ended. The last status is shown below.`);
    $("alert").hidden = false;
  }
  setTimeout(poll, POLL_MS);
}

poll();
