// The formulas of lessons 9.6.1 (planner.py) and 9.2.5, in the page: a test holds them equal to the lessons' own.

// bytes per number: of weights, of the residual stream's gradients, of the other gradients of activations
const BYTES = { fp32: [4, 4, 4], "bf16-mixed": [4, 4, 2], "bf16-true": [2, 2, 2] };
const VITS = { "ViT-B/16": { layers: 12, heads: 12, width: 768 }, "ViT-L/16": { layers: 24, heads: 16, width: 1024 } };
const GIB = 2 ** 30;

// What one encoder block keeps for backward (9.6.1).
function blockBytes(B, T, C, H, precision) {
  const [norms, products] = { fp32: [4, 4], "bf16-mixed": [4, 2], "bf16-true": [2, 2] }[precision];
  const copies = precision === "bf16-mixed" ? 2 * 12 * C ** 2 : 0;
  return B * T * (norms * (2 * C + 4) + products * 14 * C + 4 * H) + copies;
}

function weights({ layers, width, tokens = 197 }) {
  return layers * (12 * width ** 2 + 13 * width) + (3 * 16 ** 2 + 1) * width + (tokens + 1) * width
    + 2 * width + 10 * (width + 1);
}

// Bytes by kind at the three moments that can be the peak (9.6.1); `zero` of `data` GPUs shares the state (9.2.5).
function budget({ batch, precision, optimizer, checkpointing, zero = 0, data = 1, ...model }) {
  const { layers, heads, width, tokens = 197 } = model, [size, residual, inner] = BYTES[precision];
  const share = (first) => (zero >= first ? data : 1), count = weights(model);
  const border = batch * tokens * width * size, block = blockBytes(batch, tokens, width, heads, precision);
  const kept = checkpointing ? (layers - 1) * border + block : layers * block + 2 * border;
  const images = batch * 3 * 224 ** 2 * (size + (precision === "bf16-mixed" ? 2 : 0));
  const mlp = batch * tokens * width * (residual + 4 * inner);
  const moments = optimizer === "AdamW" ? (2 * count * size) / share(1) : 0;
  const moment = (gradients, activations, temporaries) => ({
    parameters: (count * size) / share(3), "optimizer state": moments, gradients, activations: activations + images,
    temporaries,
  });
  const gradients = (count * size) / share(2);
  return {
    "forward turns into backward": moment(0, kept, mlp),
    "end of backward": moment(gradients, block, mlp),
    "optimizer's step": moment(gradients, 0, moments / 2),
  };
}

const sum = (parts) => Object.values(parts).reduce((a, b) => a + b, 0);
const peak = (moments) => Math.max(...Object.values(moments).map(sum));

// No step is shorter than its products at the peak rate, or its bytes at the full bandwidth. The bytes: weights read
// in forward and in backward, gradients written, all of the state read and written by the optimizer, and what
// backward needs written and read once.
function floor({ peakTflops, bandwidth, ...setup }) {
  const { batch, precision, optimizer, checkpointing, layers, tokens = 197 } = setup, size = BYTES[precision][0];
  // of two FLOPs per weight and token: backward takes two; a block runs again but for its last product, a third of it
  const passes = checkpointing ? 3 + 2 / 3 : 3;
  const flops = passes * 2 * weights(setup) * batch * tokens;
  const kept = checkpointing ? layers * batch * tokens * setup.width * size
    : layers * blockBytes(batch, tokens, setup.width, setup.heads, precision);
  const bytes = weights(setup) * size * (passes - 1 + 1 + (optimizer === "AdamW" ? 7 : 3)) + 2 * kept;
  const times = { arithmetic: flops / (peakTflops * 1e12), memory: bytes / (bandwidth * 1e9) };
  return { flops, bytes, ...times, seconds: Math.max(times.arithmetic, times.memory) };
}

// Bytes on each of `data` ranks under stage `zero`, a 16-bit copy of the weights included (9.2.5).
function bytesPerParameter(zero, data, { weight = 4, gradient = 4, optimizer = 8, copy = 0 } = {}) {
  const shares = [[weight, 3], [copy, 3], [gradient, 2], [optimizer, 1]];
  return shares.reduce((all, [size, first]) => all + size / (zero >= first ? data : 1), 0);
}

// The micro-batches of a step, as few as memory allows, and the GiB on each GPU (9.2.5).
function memory(plan, model, hardware, sequences) {
  const parts = plan.tensor * plan.pipeline, mine = Math.floor(sequences / plan.data);
  const state = (model.parameters / parts) * bytesPerParameter(plan.zero, plan.data, { copy: 2 });
  const one = (34 * model.width * model.tokens * model.layers) / parts;
  if (plan.pipeline > 1) return [mine, (state + Math.min(mine, plan.pipeline) * one) / GIB];
  const room = hardware.gib * GIB - state;
  let together = 1;
  for (let k = 1; k <= mine; k++) if (mine % k === 0 && k * one <= room) together = k;
  return [Math.floor(mine / together), (state + together * one) / GIB];
}

// What data parallelism adds to a step (9.2.5).
function dataSeconds(zero, m, forward, half) {
  const backward = 2 * forward, over = (x) => Math.max(0, x);
  if (zero === 3) return m * (over(half(2) - forward) + over(half(2) + half(4) - backward));
  if (zero === 2) return m * over(half(4) - backward) + half(4);
  if (zero === 1) return over(half(4) - backward) + half(4);
  return over(2 * half(4) - backward);
}

// Seconds of a step by what they go to (9.2.5).
function seconds(plan, model, hardware, sequences, m) {
  const { data: d, tensor: t, pipeline: p, zero } = plan;
  const mine = model.parameters / t / p, batch = (sequences / d / m) * model.tokens;
  const forward = (2 * mine * batch) / hardware.flops, output = 2 * batch * model.width;
  const { inside, across, machine, latency, gpus } = hardware;
  const half = (ranks, size, bandwidth) => (ranks - 1) * (latency + size / ranks / bandwidth);
  const exchange = (10 * half(t, output, inside) * model.layers) / p;
  const neighbours = p > 1 ? 2 * half(2, (2 * output) / t, gpus <= machine ? inside : across) : 0;
  // a data group that leaves its machines sends over all the cards that it has in each
  const cards = Math.min(inside, across * Math.floor(machine / t));
  const network = t * d <= machine ? inside : cards;
  const exposed = dataSeconds(zero, m, forward, (size) => half(d, size * mine, network));
  const parts = { computation: m * 3 * forward, tensor: m * exchange, neighbours: m * neighbours };
  return { ...parts, bubble: ((p - 1) * sum(parts)) / m, data: exposed };
}

// Hours, dollars and kWh of a run, from prices that the reader types.
function bill({ stepSeconds, steps, gpus, gpuHour, watts, overhead, kwhPrice }) {
  const hours = (stepSeconds * steps) / 3600, gpuHours = hours * gpus, kwh = (gpuHours * watts * overhead) / 1000;
  return { hours, gpuHours, rent: gpuHours * gpuHour, kwh, power: kwh * kwhPrice };
}

const formulas = { blockBytes, weights, budget, peak, floor, bytesPerParameter, memory, dataSeconds, seconds, bill };

// --- the page ---

const KINDS = ["parameters", "optimizer state", "gradients", "activations", "temporaries"];
const CARDS = [8, 16, 24, 40, 80, 141];
const round = (x, digits = 3) => Number(x.toPrecision(digits)).toLocaleString("en", { maximumSignificantDigits: digits });

function time(s) {
  const [name, unit] = [["h", 3600], ["min", 60], ["s", 1], ["ms", 1e-3], ["µs", 1e-6]].find(([, u]) => s >= u) || ["µs", 1e-6];
  return `${round(s / unit)} ${name}`;
}

function table(caption, head, rows) {
  const cells = (row) => row.map((cell, i) => (i ? `<td>${cell}</td>` : `<th scope="row">${cell}</th>`)).join("");
  const body = rows.map((row) => `<tr>${cells(row)}</tr>`).join("");
  const top = head.map((name) => `<th scope="col">${name}</th>`).join("");
  return `<div class="scroll" tabindex="0" role="region" aria-label="${caption}"><table><caption>${caption}</caption>`
    + `<thead><tr>${top}</tr></thead><tbody>${body}</tbody></table></div>`;
}

function bars(moments) {
  const most = peak(moments);
  const part = ([kind, size]) =>
    `<span class="part k${KINDS.indexOf(kind)}" style="width:${(100 * size) / most}%"></span>`;
  const line = ([name, kinds]) => `<div class="bar"><span class="name">${name}, ${round(sum(kinds) / GIB)} GiB</span>`
    + `<span class="parts" aria-hidden="true">${Object.entries(kinds).map(part).join("")}</span></div>`;
  const legend = KINDS.map((kind, i) => `<span><span class="part k${i}" aria-hidden="true"></span> ${kind}</span>`);
  return `${Object.entries(moments).map(line).join("")}<p class="legend">${legend.join(" ")}</p>`;
}

// The values of a form by name; throws a sentence about the first one that is missing or out of range.
function read(form) {
  const found = {};
  for (const field of form.elements) {
    if (!field.name) continue;
    if (field.type === "number" && !(field.value && field.checkValidity()))
      throw new Error(`${field.labels[0].textContent.trim()}: ${field.validationMessage || "a number is missing"}`);
    found[field.name] = field.type === "checkbox" ? field.checked : field.type === "number" ? +field.value : field.value;
  }
  return found;
}

function oneGpu(given) {
  const setup = { ...given, ...VITS[given.model], data: given.copies, zero: +given.zero };
  const moments = budget(setup), most = peak(moments), least = floor(setup);
  const fits = CARDS.find((card) => most / GIB <= 0.75 * card);
  const rows = Object.entries(moments).map(([name, kinds]) =>
    [name, ...KINDS.map((kind) => round(kinds[kind] / GIB)), round(sum(kinds) / GIB)]);
  const bound = least.arithmetic >= least.memory ? "arithmetic" : "memory";
  return [least.seconds, given.copies, `<p><strong>${round(most / GIB)} GiB</strong> on each GPU at the peak`
    + ` (${round(weights(setup) / 1e6)} million parameters); ${fits ? `fits a card of ${fits} GiB` : "fits none of the usual cards"}`
    + ` with a quarter to spare.</p>${bars(moments)}${table("GiB by moment and kind", ["moment", ...KINDS, "together"], rows)}`
    + `<p>No step is shorter than <strong>${time(least.seconds)}</strong>: ${round(least.flops / 1e12)} TFLOP take`
    + ` ${time(least.arithmetic)}, ${round(least.bytes / 1e9)} GB take ${time(least.memory)}; ${bound} sets the floor.</p>`];
}

function manyGpus(given) {
  const plan = { data: given.data, tensor: given.tensor, pipeline: given.pipeline, zero: +given.zero };
  const gpus = plan.data * plan.tensor * plan.pipeline;
  const model = { parameters: given.billions * 1e9, layers: given.layers, width: given.width, tokens: given.tokens };
  const hardware = { gpus, gib: given.gib, flops: (given.share / 100) * given.peakTflops * 1e12, machine: given.machine,
    inside: given.inside * 1e9, across: given.across * 1e9, latency: given.latency * 1e-6 };
  if (given.sequences % plan.data) throw new Error(`${plan.data} groups cannot share ${given.sequences} sequences.`);
  if (model.layers % plan.pipeline) throw new Error(`${plan.pipeline} stages cannot share ${model.layers} layers.`);
  if (plan.tensor > given.machine) throw new Error("Tensor parallelism stays inside a machine.");
  const [m, gib] = memory(plan, model, hardware, given.sequences);
  const parts = seconds(plan, model, hardware, given.sequences, m), total = sum(parts);
  const used = (6 * model.parameters * given.sequences * model.tokens) / (gpus * total) / (given.peakTflops * 1e12);
  const rows = Object.entries(parts).map(([name, s]) => [name, time(s), `${round((100 * s) / total, 2)}%`]);
  return [total, gpus, `<p><strong>${round(gib)} GiB</strong> on each of ${gpus} GPUs, in ${m} micro-batches;`
    + ` ${gib <= given.gib ? "it fits" : "it does not fit"}. A step takes <strong>${time(total)}</strong>,`
    + ` MFU ${round(100 * used, 2)}%.</p>${table("where a step's time goes", ["part", "time", "share"], rows)}`];
}

function theBill(given) {
  const [s, gpus] = given.source === "own" ? [given.ownSeconds, given.ownGpus] : theBill.known[given.source] || [];
  if (!s) throw new Error("The form above has no answer yet.");
  const found = bill({ ...given, stepSeconds: s, gpus });
  return [0, 0, `<p>${round(given.steps)} steps of ${time(s)} on ${gpus} GPU${gpus > 1 ? "s" : ""}: ${round(found.hours)} hours,`
    + ` ${round(found.gpuHours)} GPU-hours. Rent <strong>$${round(found.rent)}</strong>; energy`
    + ` <strong>${round(found.kwh)} kWh</strong>, which costs $${round(found.power)} where you pay for it yourself.</p>`];
}
theBill.known = {};

function start() {
  const forms = { one: oneGpu, many: manyGpus, bill: theBill };
  const update = () => {
    for (const [name, answer] of Object.entries(forms)) {
      const place = document.getElementById(`${name}-answer`);
      try {
        const [s, gpus, html] = answer(read(document.getElementById(name)));
        theBill.known[name] = [s, gpus];
        place.innerHTML = html;
      } catch (error) {
        delete theBill.known[name];
        place.textContent = error.message;
      }
    }
  };
  for (const name of Object.keys(forms)) document.getElementById(name).addEventListener("input", update);
  update();
}

if (typeof document !== "undefined") document.addEventListener("DOMContentLoaded", start);
else module.exports = formulas;
