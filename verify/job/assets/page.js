// Build the page of a job from the JSON in it. Texts are set as text, never as markup.
addEventListener("error", (event) => {
  const note = document.getElementById("failed");
  note.hidden = false;
  note.textContent = "A part of this page could not be drawn: " + event.message;
});

const job = JSON.parse(document.getElementById("job").textContent);
const unit = timeUnit(job.ended - job.began);
const ROWS = innerWidth < 600 ? 8 : 25;
const LANES = 24;

// An element with a text, in which long names and paths may break before a word of theirs.
function make(tag, text, kind) {
  const made = document.createElement(tag);
  for (const word of String(text ?? "").match(/\S+|\s+/g) ?? []) {
    const parts = word.length > 20 ? word.split(/(?<=[._/])(?=[a-z])/) : [word];
    made.append(parts[0], ...parts.slice(1).flatMap((part) => [document.createElement("wbr"), part]));
  }
  if (kind) made.className = kind;
  return made;
}

function since(t) {
  if (t === null || t === undefined || !t) return "not recorded";
  const seconds = t - job.began, sign = seconds < 0 ? "-" : "+";
  const whole = Math.abs(seconds), h = Math.floor(whole / 3600), m = Math.floor((whole % 3600) / 60);
  const rest = (whole % 60).toFixed(whole < 600 ? 2 : 0);
  return sign + (h ? h + " h " : "") + (h || m ? m + " min " : "") + rest + " s";
}

function date(t) {
  return new Date(t * 1000).toISOString().replace("T", " ").slice(0, 19) + " UTC";
}

function number(value, digits = 4) {
  if (value === null || value === undefined) return "";
  if (Number.isInteger(value)) return String(value);
  if (Math.abs(value) < 1e-4) return value.toExponential(2);
  return Math.abs(value) >= 100 ? value.toFixed(1) : String(Number(value.toPrecision(digits)));
}

function section(id, title) {
  const made = document.getElementById("content").appendChild(make("section"));
  const heading = made.appendChild(make("h2", title));
  heading.id = id;
  made.setAttribute("aria-labelledby", id);
  const link = make("a", title);
  link.href = "#" + id;
  document.getElementById("sections").appendChild(make("li")).appendChild(link);
  return made;
}

// Show `show(first, last)` of `count` things, `size` at a time, with buttons where there are more.
function paged(parent, what, count, size, show) {
  let page = 0;
  const last = Math.max(0, Math.ceil(count() / size) - 1);
  const bar = make("div", null, "pages"), back = make("button", "Previous"), next = make("button", "Next");
  const said = make("span");
  said.setAttribute("aria-live", "polite");
  back.setAttribute("aria-label", "Previous " + what);
  next.setAttribute("aria-label", "Next " + what);
  const update = () => {
    const total = count(), pages = Math.max(1, Math.ceil(total / size));
    page = Math.min(Math.max(page, 0), pages - 1);
    const end = Math.min(total, (page + 1) * size);
    said.textContent = total ? what + " " + (page * size + 1) + " to " + end + " of " + total : "no " + what + " match";
    back.disabled = page === 0;
    next.disabled = page === pages - 1;
    show(page * size, end);
  };
  back.addEventListener("click", () => { page -= 1; update(); });
  next.addEventListener("click", () => { page += 1; update(); });
  bar.append(back, next, said);
  if (last) parent.appendChild(bar);
  update();
  return { restart: () => { page = 0; update(); }, bar: bar };
}

// A table with a filter and pages. `all`: [title, cell(row), class]; a cell is text or [text, class]. Columns without any text are left out.
function table(parent, what, caption, rows, all) {
  const columns = all.filter(([, cell]) => !rows.length || rows.some((row) => ![undefined, null, ""].includes([cell(row)].flat()[0])));
  const box = make("div", null, "scroll"), made = box.appendChild(make("table"));
  made.appendChild(make("caption", caption));
  const head = made.appendChild(make("thead")).appendChild(make("tr"));
  for (const [title, , kind] of columns) head.appendChild(make("th", title, kind)).scope = "col";
  const body = made.appendChild(make("tbody"));
  let shown = rows;
  const show = (first, last) => {
    const lines = shown.slice(first, last).map((row) => {
      const line = make("tr");
      for (const [title, cell, kind] of columns) {
        const value = cell(row);
        const [text, style] = Array.isArray(value) ? value : [value, ""];
        line.appendChild(make("td", text, [kind || "", style || ""].join(" ").trim())).dataset.head = title;
      }
      return line;
    });
    body.replaceChildren(...lines);
  };
  const pages = paged(parent, what, () => shown.length, ROWS, show);
  if (rows.length > ROWS) {
    const filter = make("input");
    filter.type = "search";
    filter.placeholder = "Filter";
    filter.setAttribute("aria-label", "Filter " + what);
    filter.addEventListener("input", () => {
      const wanted = filter.value.toLowerCase();
      shown = rows.filter((row) => columns.some(([, cell]) => {
        const value = cell(row);
        return String(Array.isArray(value) ? value[0] : value).toLowerCase().includes(wanted);
      }));
      pages.restart();
    });
    pages.bar.prepend(filter);
  }
  parent.appendChild(box);
}

function details(parent, title) {
  const made = parent.appendChild(make("details"));
  made.appendChild(make("summary", title));
  return made;
}

function counted(states) {
  return Object.entries(states).sort().filter(([state]) => state !== "skipped").map(([state, count]) => count + " " + state).join(", ");
}

function colour(verdict) {
  return verdict === "proven" ? "good" : verdict === "not proven" ? "bad" : "";
}

function header() {
  document.getElementById("run").textContent = job.run;
  const line = document.getElementById("summary");
  const broke = job.incidents.filter((row) => row.kind !== "off");
  // A verdict's first line, which has no time, says how the job ended.
  const first = broke.find((row) => row.t === null) || broke[broke.length - 1];
  document.getElementById("verdict").append(make("span", job.verdict, colour(job.verdict)));
  line.append(job.running ? "Running. " : job.how ? "Ended: " + job.how + ". " : "Ended. ",
    job.processes.length + (job.processes.length === 1 ? " process" : " processes") + (job.alive ? ", " + job.alive + " of them alive" : "") + ", ",
    job.updates.length + " recorded weight update" + (job.updates.length === 1 ? ", " : "s, ") +
    job.syncs.length + (job.syncs.length === 1 ? " sync" : " syncs") + ". Refusals and problems: " + broke.length +
    ". Begun " + date(job.began) + ", " +
    (job.running ? "still running after " : "last heard of after ") +
    since(job.ended).slice(1).replace(/(min \d+)\.\d+/, "$1") + ".");
  const alive = job.processes.filter((row) => row.alive === "yes");
  const about = document.getElementById("about");
  const answers = [["training", progress()],
    ["live", job.names.map((row) => row.name + " " + row.verdict +
      (row.verdict === "proven" ? "" : " (acted " + (row.acted === "nowhere" ? "" : "in ") + row.acted + ")")).join(", ")],
    ["broke", first ? (first.process ? first.process + ": " : "") + first.text.slice(0, 200) : "nothing was recorded"]];
  for (const [what, text] of [...answers, ...job.about, ["alive", alive.slice(0, 8).map((row) => row.name).join(", ") +
      (alive.length > 8 ? " and " + (alive.length - 8) + " more" : "")]]) {
    if (text) about.append(make("dt", what), make("dd", text));
  }
  document.getElementById("made").textContent = "Made by FlashPatch " + job.version + ", " + date(job.generated) +
    ", from what the job's processes wrote. Charts: Chart.js (MIT).";
}

function versions() {
  if (!job.lanes.length) return;
  const part = section("versions", "Policy versions");
  const text = "Which policy version each process held over time, processes of a replica after each other.";
  const where = canvas(part, text, Math.min(job.lanes.length, LANES) * 30 + 110);
  let entry = null;
  const figure = where.closest("figure");
  paged(part, "lanes", () => job.lanes.length, LANES, (first, last) => {
    if (entry) {
      entry.chart.destroy();
      drawn.splice(drawn.indexOf(entry), 1);
    }
    entry = laneChart(where, job.lanes.slice(first, last), job, unit);
  });
  part.appendChild(figure);
  const held = (lane) => lane.segments[lane.segments.length - 1][3];
  table(details(part, "Policy versions as a table"), "lanes", "Last version of each process", job.lanes, [
    ["replica", (lane) => lane.replica, "number"], ["process", (lane) => lane.process, "name"],
    ["last version", (lane) => held(lane), "number"],
    ["since", (lane) => lane.timed ? since(lane.segments[lane.segments.length - 1][0]) : "not recorded", "number"],
    ["refused or failed", (lane) => lane.marks.length, "number"]]);
}

function updates() {
  const rows = job.updates;
  if (!rows.length) return;
  const part = section("updates", "Weight updates");
  const phases = rows.map((row) => ({ load: row.load, commit: row.commit,
    wait: Math.max(0, (row.seconds || 0) - (row.load || 0) - (row.commit || 0)) }));
  const names = { wait: "waiting for the sender", load: "loading", commit: "committing" };
  const shown = joined(phases, Object.keys(names), 200);
  const each = shown.size > 1 ? ", each bar the mean of " + shown.size + " updates" : "";
  const text = "Seconds of each weight update by what it was spent on, in order of their ends" + each + ".";
  stackedChart(canvas(part, text), "update", shown.bars, names);
  table(part, "updates", "Weight updates, oldest first", rows, [
    ["ended", (row) => since(row.t), "number"], ["process", (row) => row.process, "name"],
    ["outcome", (row) => [row.outcome, row.outcome]], ["version", (row) => number(row.version), "number"],
    ["role", (row) => row.role], ["seconds", (row) => number(row.seconds), "number"],
    ["loading", (row) => number(row.load), "number"], ["committing", (row) => number(row.commit), "number"],
    ["buckets", (row) => number(row.buckets), "number"]]);
}

function syncs() {
  const rows = job.syncs;
  if (!rows.length) return;
  const part = section("syncs", "Syncs of trainer and rollouts");
  const phases = { gather: "gathering", transfer: "transfer", load: "loading", process: "before and after loading" };
  const phased = rows.some((row) => Object.keys(phases).some((phase) => row[phase]));
  const names = phased ? phases : { total: "whole sync" };
  const shown = joined(rows, Object.keys(names), 200);
  const each = shown.size > 1 ? ", each bar the mean of " + shown.size + " syncs" : "";
  const text = (phased ? "Seconds of each sync by phase, each of the slowest rank, so that a bar may be more or less than the whole, which is in the table"
    : "Seconds of each sync, whose phases were not recorded") + each + ".";
  stackedChart(canvas(part, text), "sync", shown.bars, names);
  table(part, "syncs", "Syncs, oldest first", rows, [
    ["ended", (row) => since(row.t), "number"], ["step", (row) => number(row.step), "number"],
    ["version", (row) => number(row.version), "number"], ["seconds", (row) => number(row.total), "number"],
    ["gathering", (row) => number(row.gather), "number"], ["transfer", (row) => number(row.transfer), "number"],
    ["loading", (row) => number(row.load), "number"], ["before, after", (row) => number(row.process), "number"],
    ["bytes", (row) => bytes(row.bytes), "number"],
    ["share sent", (row) => number(row.share), "number"]]);
}

function incidents() {
  const part = section("incidents", "Refusals and errors");
  if (!job.incidents.length) {
    part.appendChild(make("p", "None was recorded.", "good"));
    return;
  }
  table(part, "incidents", "Refusals, failed updates, errors and verdicts, oldest first; a verdict has no time",
    job.incidents, [["when", (row) => row.t === null ? "" : since(row.t), "number"], ["process", (row) => row.process, "name"],
      ["what", (row) => [row.kind, row.kind.split(" ").pop()], "kind"], ["text", (row) => row.text]]);
}

const OF_TRAINING = { reward: "reward", loss: "loss", length: "tokens per response", steps: "seconds per step", mismatch: "gap of rollout and trainer, k3" };

// What training did, in one line: the means of the first and of the last tenth of each number.
function progress() {
  const mean = (some) => some.reduce((sum, value) => sum + value, 0) / some.length;
  return job.charts.filter((chart) => chart.id in OF_TRAINING).map((chart) => {
    const line = chart.lines.find((one) => one.label.endsWith("/step")) || chart.lines[0];
    const values = line.points.map((point) => point[1]), tenth = Math.max(1, Math.floor(values.length / 10));
    return OF_TRAINING[chart.id] + " " + number(mean(values.slice(0, tenth)), 3) + " \u2192 " + number(mean(values.slice(-tenth)), 3);
  }).join(", ");
}

function training() {
  const found = job.charts.filter((chart) => chart.id in OF_TRAINING);
  if (found.length) charts(section("training", "Training"), found);
}

function measurements() {
  const found = job.charts.filter((chart) => !(chart.id in OF_TRAINING));
  if (found.length) charts(section("measurements", "Measurements"), found);
}

// The end of the scale where the first step, which warms up, would press all others flat.
function scaled(chart) {
  const first = Math.min(...chart.lines.map((line) => line.points[0][0])), values = [[], []];
  for (const [at, value] of chart.lines.flatMap((line) => line.points)) values[at > first ? 1 : 0].push(value);
  const most = Math.max(...values[1]), digit = 10 ** Math.floor(Math.log10(most));
  return chart.id === "steps" && values[1].length > 1 && Math.max(...values[0]) > 3 * most ? Math.ceil(most / digit) * digit : undefined;
}

function charts(part, shown) {
  const grid = part.appendChild(make("div", null, "charts"));
  for (const chart of shown) {
    const cell = grid.appendChild(make("div"));
    cell.appendChild(make("h3", chart.title));
    const top = scaled(chart), first = Math.max(...chart.lines.map((line) => line.points[0][1]));
    const said = [...(chart.shown < chart.recorded ? [chart.shown + " of " + chart.recorded + " points drawn."] : []),
      ...(top ? ["The first step, " + number(first) + " " + chart.unit + ", is above the scale."] : [])].join(" ");
    lineChart(canvas(cell, chart.title + ", " + chart.unit + ". " + said, 0, said), chart, job, unit, top);
    const summary = chart.lines.map((line) => {
      const values = line.points.map((point) => point[1]);
      return { label: line.label, first: values[0], last: values[values.length - 1],
        least: Math.min(...values), most: Math.max(...values), points: values.length };
    });
    table(details(cell, "As a table"), "lines", chart.title + ", " + chart.unit, summary,
      [["line", (row) => row.label, "name"], ...["points", "first", "last", "least", "most"].map(
        (name) => [name, (row) => number(row[name]), "number"])]);
  }
}

function names() {
  const part = section("names", "What was switched on");
  table(part, "names", "Names as they were typed, where their patches were called, and whether all that is due was seen",
    job.names, [["name", (row) => row.name, "kind"], ["acted in", (row) => row.acted], ["calls", (row) => row.calls, "number"],
      ["last version", (row) => row.versions.join(", ")], ["precision", (row) => row.precision],
      ["verdict", (row) => [row.verdict, colour(row.verdict)]]]);
  table(part, "statements", "What each name did for the job, as far as its settings ask for it, and what was seen of it",
    job.stated, [["name", (row) => row.name, "kind"], ["statement", (row) => row.what],
      ["seen", (row) => row.seen ? row.seen : ["not seen", job.running ? "" : "bad"]], ["asked for", (row) => row.asked]]);
}

function processes() {
  const part = section("processes", "Processes");
  const acted = job.processes.filter((row) => row.calls || row.verdict !== "ok");
  processTable(part, "processes", acted);
  const idle = job.processes.filter((row) => !row.calls && row.verdict === "ok");
  if (idle.length) processTable(details(part, idle.length + " that called no patch"), "idle processes", idle);
}

function processTable(parent, what, rows) {
  table(parent, what, "Processes of the job, what they carried, and whether all that was due was seen",
    rows, [["process", (row) => row.name, "name"],
      ["verdict", (row) => [row.verdict, row.verdict === "ok" ? "good" : "bad"]], ["ended", (row) => row.how],
      ["first seen", (row) => since(row.began), "number"], ["last seen", (row) => since(row.ended), "number"],
      ["names", (row) => row.names.join(", ")], ["patches", (row) => counted(row.states)],
      ["calls", (row) => row.calls, "number"], ["policy", (row) => number(row.version), "number"],
      ["memory", (row) => bytes(row.rss_bytes), "number"], ["problems", (row) => row.problems.join("; "), "text"]]);
}

function patches() {
  const part = section("patches", "Patches and evidence");
  table(part, "patches", "Patches that were on, with the calls of all processes; evidence says when calls are due",
    job.patches, [["patch", (row) => row.id, "name"], ["calls", (row) => row.calls, "number"],
      ["called in", (row) => row.processes, "number"], ["states", (row) => counted(row.states), "states"],
      ["evidence", (row) => row.due, "text"],
      ["tested", (row) => row.tested === null ? "" : row.tested ? "yes" : "no"], ["why it is there", (row) => row.why, "why"]]);
}

function missing() {
  const part = section("missing", "Not recorded");
  const list = part.appendChild(make("ul"));
  for (const sentence of job.not_recorded) list.appendChild(make("li", sentence));
  if (!job.not_recorded.length) part.appendChild(make("p", "Everything that this page can show was recorded."));
}

header();
training();
incidents();
names();
syncs();
versions();
updates();
measurements();
processes();
patches();
missing();
followTheme();
document.body.dataset.ready = Math.round(performance.now());
