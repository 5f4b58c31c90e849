// Draws each figure of a page: its choices as lists above it, and the plot chosen, in the colours of the page.
// colour(name) is of hybridcomp/style.py, which the site's hooks put before this.

const SERIES = 8; // colours of hybridcomp/style.py
const SYMBOLS = ["circle", "square", "triangle-up", "diamond", "x", "cross", "star", "hexagon"];
const BITS = [0.03, 0.1, 0.3, 1, 2, 4, 8, 16, 32];
const DASHES = ["solid", "dash", "dot"];

function bytes(size) {
  for (const [unit, least] of [["M", 2 ** 20], ["K", 2 ** 10]]) if (size >= least) return `${size / least}${unit}`;
  return `${size}`;
}

// Names beside points, of those with short ones, where they cover neither points nor each other; by trace and point.
function labels(plot, width, height) {
  const all = plot.traces.flatMap((trace, t) => trace.x.map((x, i) => ({ t, i, x: Math.log(x), y: Math.log(trace.y[i]), name: trace.text[i] })));
  const scale = (key, pixels) => pixels / (Math.max(...all.map((one) => one[key])) - Math.min(...all.map((one) => one[key])));
  const [across, up] = [scale("x", width), scale("y", height)];
  const boxes = [];
  const shown = new Set();
  for (const one of all) {
    const box = [one.x * across + 6, one.x * across + 10 + 7 * one.name.length, one.y * up];
    const covered = all.some((other) => other.x * across > box[0] && other.x * across < box[1] && Math.abs(other.y * up - box[2]) < 9);
    const crossed = boxes.some((other) => other[0] < box[1] && box[0] < other[1] && Math.abs(other[2] - box[2]) < 14);
    if (plot.traces[one.t].peer || /[: ]/.test(one.name) || covered || crossed) continue;
    boxes.push(box);
    shown.add(`${one.t} ${one.i}`);
  }
  return shown;
}

function points(plot, trace, index, width) {
  const narrow = width < 600;
  const ours = plot.traces.slice(0, index).filter((one) => !one.peer).length;
  const shade = trace.peer ? colour("muted") : colour(`series-${ours % SERIES}`);
  const made = { name: trace.name, x: trace.x, y: trace.y, customdata: trace.text, marker: { color: shade } };
  const off = (i) => trace.spread.map((ends, at) => Math.abs(ends[i] - trace.y[at]));
  const spread = trace.spread && { array: off(1), arrayminus: off(0), color: colour("text"), thickness: 1.5 };
  if (plot.kind === "bars") {
    const text = trace.y.map((y) => (y >= 100 ? y.toFixed(0) : y.toPrecision(3)));
    const inside = { textposition: "auto", insidetextanchor: "start", insidetextfont: { color: colour("background") }, textangle: 0 };
    return { ...made, x: trace.y, y: trace.x, type: "bar", orientation: "h", text, ...inside, error_x: spread, hovertemplate: "%{y}: %{x}<extra></extra>" };
  }
  made.error_y = spread;
  Object.assign(made.marker, { symbol: SYMBOLS[index % SYMBOLS.length], size: plot.kind === "points" ? 9 : 6 });
  if (trace.peer) made.marker.symbol += "-open";
  if (plot.kind === "points") {
    const few = plot.traces.every((one) => one.text.length < 2);
    const named = few || narrow ? new Set() : labels(plot, width - 90, 380);
    const text = trace.text.map((name, i) => (few || named.has(`${index} ${i}`) ? name : "")); // the pointer shows all
    const template = "%{customdata}<br>%{x}, %{y}<extra></extra>";
    return { ...made, mode: "markers+text", text, textposition: few ? ["top right", "bottom right"][index % 2] : "middle right", textfont: { size: 11 }, hovertemplate: template, cliponaxis: false };
  }
  const dash = trace.peer ? DASHES[1 + (index % 2)] : "solid";
  return { ...made, mode: "lines+markers", line: { color: shade, dash, width: 2 } };
}

function axis(title, log, extra) {
  const lines = { gridcolor: colour("line"), linecolor: colour("muted"), zerolinecolor: colour("line"), automargin: true };
  return { title: { text: title }, type: log ? "log" : "-", ...lines, ...extra };
}

function layout(plot, narrow) {
  const sizes = (plot.x || "").startsWith("size") ? [...new Set(plot.traces.flatMap((one) => one.x))].sort((a, b) => a - b) : null;
  const every = sizes && narrow && sizes.length > 5 ? sizes.filter((_, i) => i % 2 === 0) : sizes;
  const bits = plot.kind === "points" && (plot.x || "").startsWith("bits") && { tickvals: BITS, ticktext: BITS.map(String) };
  const ticks = every ? { tickvals: every, ticktext: every.map(bytes) } : bits || {};
  const log = plot.log || "";
  const bars = plot.kind === "bars";
  const rule = { type: "line", line: { color: colour("text"), width: 1 } };
  const one = bars ? { ...rule, yref: "paper", y0: 0, y1: 1, x0: 1, x1: 1 } : { ...rule, xref: "paper", x0: 0, x1: 1, y0: 1, y1: 1 };
  const lines = Math.ceil(plot.traces.length / (narrow ? 1 : 3));
  const values = plot.traces.flatMap((trace) => trace.y);
  const step = Math.max(...values) / Math.min(...values) < 20 ? "D1" : "D2";
  const y = { ...(log.includes("y") ? { dtick: step } : {}), tickformat: "~g" };
  return {
    height: bars ? 130 + 30 * new Set(plot.traces.flatMap((trace) => trace.x)).size : 420 + 22 * lines,
    margin: { l: 50, r: 16, t: 20, b: 50 },
    font: { family: getComputedStyle(document.body).fontFamily, color: colour("text"), size: 13 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    hoverlabel: { bgcolor: colour("panel"), font: { color: colour("text") }, namelength: -1 },
    hovermode: plot.kind === "lines" ? "x unified" : "closest",
    showlegend: plot.traces.length > 1 && !plot.traces.every((one) => one.text && one.text.length === 1),
    legend: { orientation: "h", yref: "container", y: 0, yanchor: "bottom", x: 0 },
    barmode: "overlay",
    shapes: plot.one ? [one] : [],
    xaxis: bars ? axis(plot.y, false, {}) : axis(plot.x || "", log.includes("x"), ticks),
    yaxis: bars ? axis("", false, { autorange: "reversed" }) : axis(plot.y, log.includes("y"), y),
  };
}

function start(place) {
  const { choices, plots } = JSON.parse(document.getElementById(`figure-${place.dataset.figure}`).textContent);
  const names = Object.keys(choices);
  const first = Object.keys(plots)[0].split("|");
  const form = document.createElement("form");
  const drawing = document.createElement("div");
  const note = document.createElement("p");
  form.className = "choices";
  note.className = "note";
  names.forEach((name, i) => {
    const label = document.createElement("label");
    const list = document.createElement("select");
    list.name = name;
    for (const option of choices[name]) list.add(new Option(option, option, false, option === first[i]));
    label.append(name, list);
    if (choices[name].length > 1) form.append(label);
  });
  const chosen = () => names.map((name) => form.elements[name]?.value ?? choices[name][0]);
  const draw = () => {
    const plot = plots[chosen().join("|")];
    const narrow = place.clientWidth < 600;
    const traces = plot.traces.map((trace, i) => points(plot, trace, i, place.clientWidth));
    Plotly.react(drawing, traces, layout(plot, narrow), { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["lasso2d", "select2d"] });
    note.textContent = plot.note;
  };
  // Where what is chosen was not measured together, the other choices follow the last one, as few of them as can.
  form.addEventListener("change", (event) => {
    const now = chosen();
    const i = names.indexOf(event.target.name);
    const alike = (one) => one.filter((value, j) => value === now[j]).length;
    const all = Object.keys(plots).map((key) => key.split("|")).filter((one) => one[i] === now[i]);
    const best = all.reduce((left, right) => (alike(right) > alike(left) ? right : left));
    best.forEach((value, j) => { if (form.elements[names[j]]) form.elements[names[j]].value = value; });
    draw();
  });
  for (const child of [...place.children]) child.hidden = true; // the picture for those without scripts
  place.append(form, drawing, note);
  draw();
  return draw;
}

const drawings = [...document.querySelectorAll("[data-figure]")].map(start);
const again = () => drawings.forEach((draw) => draw());
new MutationObserver(again).observe(document.body, { attributeFilter: ["data-md-color-scheme"] });
