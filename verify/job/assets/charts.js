"use strict";
// Draw the charts of a job's page. Each has a table beside it with the same numbers.
const PALETTE = ["#3b82c4", "#d9822b", "#3f9d6b", "#b8529f", "#8a7d2c", "#5b6bd1", "#c2544d", "#2f9ba3"];
const drawn = [];

function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function axis(title, more) {
  return Object.assign({ title: { display: true, text: title, color: css("--soft") },
    ticks: { color: css("--soft"), maxRotation: 0 }, grid: { color: css("--line") } }, more);
}

// Seconds, minutes or hours since the job began: the unit that suits its length.
function timeUnit(seconds) {
  if (seconds < 300) return { name: "seconds", seconds: 1 };
  return seconds < 3 * 3600 ? { name: "minutes", seconds: 60 } : { name: "hours", seconds: 3600 };
}

function canvas(parent, description, height, written = description) {
  const figure = parent.appendChild(document.createElement("figure"));
  const box = figure.appendChild(document.createElement("div"));
  box.className = "canvas";
  if (height) box.style.height = height + "px";
  const made = box.appendChild(document.createElement("canvas"));
  made.setAttribute("role", "img");
  made.setAttribute("aria-label", description);
  if (written) figure.appendChild(document.createElement("figcaption")).textContent = written;
  return made;
}

function draw(where, make) {
  const entry = { make: make, chart: null };
  entry.chart = new Chart(where, make());
  drawn.push(entry);
  return entry;
}

function redraw() {
  for (const entry of drawn) {
    const made = entry.make();
    entry.chart.options = made.options;
    entry.chart.update("none");
  }
}

function base(more) {
  return Object.assign({ animation: false, responsive: true, maintainAspectRatio: false,
    color: css("--text"), borderColor: css("--line"),
    plugins: { legend: { labels: { color: css("--text"), boxWidth: 14 } } } }, more);
}

function versionColour(version) {
  return PALETTE[version % PALETTE.length];
}

// Writes its version on each bar of a lane that has room for it.
const VERSIONS = { id: "versions", afterDatasetsDraw: (chart) => {
  const pen = chart.ctx;
  pen.save();
  Object.assign(pen, { font: "11px system-ui, sans-serif", fillStyle: "#ffffff", textAlign: "center", textBaseline: "middle" });
  chart.getDatasetMeta(1).data.forEach((bar, index) => {
    const text = chart.data.datasets[1].data[index].short;
    const begin = Math.max(bar.base, chart.chartArea.left);
    if (bar.x - begin > pen.measureText(text).width + 6) pen.fillText(text, (bar.x + begin) / 2, bar.y);
  });
  pen.restore();
} };

// A label, without its middle where a phone has no room for it.
function narrow(text, most) {
  if (innerWidth >= 600 || text.length <= most) return text;
  return text.slice(0, most / 2 - 1) + "\u2026" + text.slice(1 - most / 2);
}

// Lanes of policy versions: one row per process, one bar per version that it held.
function laneChart(where, lanes, job, unit) {
  const labels = lanes.map((lane) => lane.label);
  const at = (t) => (t - job.began) / unit.seconds;
  // The scale begins shortly before the first change of a version, or mark: the start of a job may be longer than all after it.
  const last = Math.max(...job.lanes.map((lane) => lane.segments[lane.segments.length - 1][1]));
  const first = Math.min(...job.lanes.flatMap((lane) => [lane.segments[0][1], ...lane.marks.map(([t]) => t)]));
  const bars = [], marks = [];
  lanes.forEach((lane, row) => {
    for (const [begin, end, from, to] of lane.segments) {
      const text = from === to ? "version " + from : "versions " + from + " to " + to;
      bars.push({ x: [at(begin), at(end)], y: labels[row], text: text, short: String(to), colour: versionColour(to) });
    }
    for (const [t, text] of lane.marks) marks.push({ x: at(t), y: labels[row], text: text });
  });
  const data = { labels: labels, datasets: [
    { type: "scatter", label: "update refused, abandoned or replaced", data: marks, indexAxis: "x", pointStyle: "triangle",
      radius: 6, backgroundColor: "#c2272d", borderColor: "#ffffff" },
    { type: "bar", label: "policy version held (a colour each)", data: bars, pointStyle: "rect", grouped: false, minBarLength: 1,
      barThickness: 22, backgroundColor: bars.map((bar) => bar.colour) }] };
  return draw(where, () => ({ type: "bar", data: data, plugins: [VERSIONS], options: base({ indexAxis: "y",
    scales: { x: axis(unit.name + " since the job began", { min: Math.max(0, at(first - (last - first) / 10)) }),
      y: axis("", { type: "category", labels: labels, title: { display: false }, ticks: { color: css("--text"),
        autoSkip: false, callback: (value) => narrow(labels[value].replace(innerWidth < 600 ? "replica " : "", ""), 22) } }) },
    plugins: { legend: { labels: { color: css("--text"), boxWidth: 14, usePointStyle: true } },
      tooltip: { callbacks: { label: (item) => item.raw.text } } } }) }));
}

// Join neighbours so that at most `most` bars are drawn: each is the mean of as many updates.
function joined(rows, names, most) {
  const size = Math.max(1, Math.ceil(rows.length / most)), found = [];
  for (let begin = 0; begin < rows.length; begin += size) {
    const part = rows.slice(begin, begin + size), mean = {};
    for (const name of names) mean[name] = part.reduce((sum, row) => sum + (row[name] || 0), 0) / part.length;
    const label = part.length === 1 ? String(begin + 1) : begin + 1 + " to " + (begin + part.length);
    found.push({ label: label, mean: mean });
  }
  return { size: size, bars: found };
}

function stackedChart(where, what, rows, names) {
  const data = { labels: rows.map((row) => row.label), datasets: Object.keys(names).map((name, index) => ({
    label: names[name], data: rows.map((row) => row.mean[name]), backgroundColor: PALETTE[index],
    barPercentage: 1, categoryPercentage: 0.92, maxBarThickness: 56 })) };
  return draw(where, () => ({ type: "bar", data: data, options: base({
    scales: { x: axis(what, { stacked: true }), y: axis("seconds", { stacked: true, beginAtZero: true }) } }) }));
}

function lineChart(where, chart, job, unit, top) {
  const dashes = [[], [6, 3], [2, 2]], byStep = chart.by === "step", share = chart.unit === "share" && { beginAtZero: true, suggestedMax: 1 };
  const tiny = chart.lines.every((line) => line.points.every(([, value]) => Math.abs(value) < 1e-4));
  const data = { datasets: chart.lines.map((line, index) => ({ label: narrow(line.label, 36),
    data: line.points.map(([at, value]) => ({ x: byStep ? at : (at - job.began) / unit.seconds, y: value })),
    borderColor: PALETTE[index % PALETTE.length], backgroundColor: PALETTE[index % PALETTE.length],
    borderDash: dashes[Math.floor(index / PALETTE.length)], borderWidth: 2,
    pointRadius: line.points.length > 60 ? 0 : 3 })) };
  return draw(where, () => ({ type: "line", data: data, options: base({ parsing: true,
    scales: { x: byStep ? { ...axis("step of training"), type: "linear", ticks: { ...axis("").ticks, precision: 0 } }
      : axis(unit.name + " since the job began", { type: "linear" }),
      y: axis(chart.unit, { max: top, ...share, ticks: { ...axis("").ticks, ...(tiny && { callback: (value) => number(value) }) } }) } }) }));
}

function bytes(value) {
  if (value === null || value === undefined) return "";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  for (; value >= 1024 && power < units.length - 1; power += 1) value /= 1024;
  return value.toFixed(power && value < 100 ? 1 : 0) + " " + units[power];
}

function followTheme() {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  addEventListener("beforeprint", () => {
    document.documentElement.dataset.theme = "light";
    redraw();
    for (const entry of drawn) entry.chart.resize();
  });
  addEventListener("afterprint", () => {
    delete document.documentElement.dataset.theme;
    redraw();
    for (const entry of drawn) entry.chart.resize();
  });
}
