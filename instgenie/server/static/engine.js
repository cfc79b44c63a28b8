// The engine page: shows a snapshot of the cluster twice a second, as numbers, bars and timelines.
import { ask, events } from "./api.js";
import { bytes, element, find, percent, seconds } from "./dom.js";
import { watchTemplates } from "./templates.js";
import { Timeline } from "./timeline.js";

const MS_BEFORE_RETRY = 2000;
const ORDERS = {
  preemptive: "No edit has left a batch for a more urgent one.",
  slack: "The edit with the least slack goes first; none leaves a batch.",
  edf: "The edit with the earliest deadline goes first; none leaves a batch.",
  fcfs: "The oldest edit goes first; none leaves a batch.",
};
const cards = new Map(); // one per worker, by index

async function watch() {
  for (;;) {
    try {
      for await (const snapshot of events(await ask("/engine/events"))) show(snapshot);
      setServer("the server is shutting down", "loading");
    } catch (error) {
      setServer(error.message, "error");
    }
    await new Promise((resolve) => setTimeout(resolve, MS_BEFORE_RETRY));
  }
}

function setServer(text, state) {
  find("server").textContent = text;
  find("server").dataset.state = state;
}

function show(snapshot) {
  const { model } = snapshot;
  if (model) setServer(`${model.name}, ${model.dtype}`, "ready");
  else setServer("loading the model", "loading");
  showTiles(snapshot);
  showMasks(snapshot.mask_ratios);
  showTiers(snapshot);
  showPreemptions(snapshot);
  for (const worker of snapshot.workers) cardOf(worker.index).show(worker, snapshot);
}

function showTiles(snapshot) {
  const { latency, cache_hits, num_cache_queries: queries } = snapshot;
  const hits = Object.values(cache_hits).reduce((sum, count) => sum + count, 0);
  const write = (id, text) => (find(id).textContent = text);
  const or = (value) => (value === null ? "–" : seconds(value));
  write("rate", snapshot.requests_per_second.toFixed(2));
  write("ended", `${snapshot.num_finished} edits finished, ${snapshot.num_failed} failed, ${snapshot.num_cancelled} cancelled`);
  write("p50", or(latency.p50));
  write("tail", `90 %: ${or(latency.p90)}, 99 %: ${or(latency.p99)}`);
  write("running", snapshot.num_running);
  const registering = snapshot.num_registrations_waiting;
  write("waiting", `${snapshot.num_waiting} waiting, at most ${snapshot.max_queue}`);
  find("registering").textContent = registering ? `${registering} ${registering === 1 ? "picture is" : "pictures are"} being registered` : "";
  write("met", snapshot.attainment === null ? "–" : percent(snapshot.attainment));
  const error = `predictions off by ${percent(snapshot.prediction_error)}`;
  write("predicted", `of ${snapshot.num_deadlines} edits with one, ${error}`);
  write("hits", queries ? percent(hits / queries) : "–");
  write("queries", `${hits} of ${queries} edits`);
}

function showMasks(counts) {
  const most = Math.max(...counts, 1);
  const total = counts.reduce((sum, count) => sum + count, 0);
  find("masks").ariaLabel = total
    ? `Of ${total} edits: ${counts.map((count, bin) => `${count} mask ${10 * bin} to ${10 * bin + 10} %`).join(", ")}`
    : "No edits yet";
  find("masks").replaceChildren(
    ...counts.map((count, bin) => {
      const bar = element("i");
      bar.style.height = `${(count / most) * 80}px`;
      return element("div", {}, element("span", { textContent: count || "" }), bar, element("span", { textContent: `${10 * bin + 10} %` }));
    }),
  );
}

// Edits that left a batch for others, the latest first.
function showPreemptions({ preemptions, scheduling, now }) {
  find("order").textContent = preemptions.length ? "" : ORDERS[scheduling];
  find("preempted").replaceChildren(
    ...preemptions.toReversed().map(({ at, job, by }) =>
      element(
        "li",
        {},
        element("span", { className: "quiet", textContent: `${seconds(Math.max(now - at, 0))} ago` }),
        element("code", { textContent: job.slice(0, 8) }),
        element("span", { className: "quiet", textContent: "for" }),
        element("code", { textContent: by.slice(0, 8) }),
      ),
    ),
  );
}

function showTiers({ workers, cache_hits, cache_bytes }) {
  const held = {};
  for (const { tier_bytes } of workers) {
    for (const [tier, amount] of Object.entries(tier_bytes)) held[tier] = (held[tier] ?? 0) + amount;
  }
  const templates = workers.reduce((sum, worker) => sum + worker.num_templates, 0);
  find("tiers").replaceChildren(
    ...Object.entries(held).map(([tier, amount]) =>
      element(
        "div",
        { className: "tier" },
        element("span", { textContent: `${tier}: ${bytes(amount)} of ${bytes(cache_bytes)}` }),
        element("span", { className: "quiet", textContent: `${templates} ${templates === 1 ? "template" : "templates"}, ${cache_hits[tier] ?? 0} hits` }),
        element("progress", { max: Math.max(cache_bytes, 1), value: amount, ariaLabel: `${tier} memory in use` }),
      ),
    ),
  );
}

class Card {
  constructor(index) {
    this.name = element("h2", { textContent: `Worker ${index}` });
    this.state = element("span");
    this.pace = element("span");
    this.canvas = element("canvas", { className: "timeline", ariaLabel: `Jobs of worker ${index} over the last seconds` });
    this.canvas.setAttribute("role", "img");
    this.jobs = element("ul", { className: "jobs", ariaLabel: `Running jobs of worker ${index}` });
    this.section = element("section", { className: "card worker" }, this.title(), this.canvas, this.jobs);
    this.timeline = new Timeline(this.canvas);
  }

  title() {
    const legend = element("span", { className: "legend" });
    for (const [name, text] of [["cached", "activations reused"], ["dense", "every token computed"], ["waits", "made way for another"]]) {
      legend.append(element("span", {}, element("i", { className: name }), text));
    }
    return element("div", { className: "title" }, this.name, this.state, this.pace, legend);
  }

  show(worker, snapshot) {
    const { state, device, processes, steps_per_second, last_step_seconds, predicted_seconds } = worker;
    const reason = processes.find((process) => process.message)?.message;
    this.state.textContent = [device, state, reason].filter(Boolean).join(", ");
    const busy = worker.running.length ? `${steps_per_second.toFixed(1)} steps/s, done in ${seconds(predicted_seconds)} (predicted)` : "idle";
    this.pace.textContent = last_step_seconds ? `${busy}, last step ${seconds(last_step_seconds)}` : busy;
    this.canvas.style.height = `${Math.min(Math.max(snapshot.max_batch_size, 4), 16) * 12 + 44}px`;
    this.timeline.update(worker, snapshot);
    this.jobs.replaceChildren(...worker.running.map((job) => jobRow(job, worker, snapshot)));
  }
}

function jobRow(job, worker, { model }) {
  const plan = job.plan.length ? job.plan : Array(model.num_blocks).fill(false);
  const blocks = element("span", { className: "blocks", ariaHidden: "true" });
  for (const isCached of plan) blocks.append(element("i", { className: isCached ? "cached" : "dense" }));
  return element(
    "li",
    {},
    element("code", { textContent: job.id.slice(0, 8) }),
    element("progress", { max: job.num_steps, value: job.step, ariaLabel: `Steps of job ${job.id.slice(0, 8)}` }),
    element("span", { textContent: `step ${job.step} of ${job.num_steps}` }),
    element("span", { className: job.slack < 0 ? "slack late" : "slack", textContent: slackText(job) }),
    element("div", { className: "plan" }, blocks, element("span", { textContent: planText(job, plan, worker) })),
  );
}

// How much time a job has beyond what it still needs, if it has a deadline, and how often it made way.
function slackText({ slack, num_preemptions: waited }) {
  const time = slack === null ? "no deadline" : slack < 0 ? `late by ${seconds(-slack)}` : `${seconds(slack)} to spare`;
  return waited ? `${time}, made way ${waited}\u00d7` : time;
}

// Shows the times the router predicts: a line fitted to the steps measured so far.
function planText(job, plan, { seconds_per_token }) {
  const cached = plan.filter(Boolean).length;
  const compute = seconds(job.num_computed_tokens * seconds_per_token);
  const tokens = `${job.num_computed_tokens} of ${job.num_tokens} tokens`;
  return `${cached} of ${plan.length} blocks cached, ${tokens}: ${compute} per step (predicted)`;
}

function cardOf(index) {
  if (!cards.has(index)) {
    cards.set(index, new Card(index));
    find("workers").append(cards.get(index).section);
  }
  return cards.get(index);
}

function animate() {
  for (const { timeline } of cards.values()) if (timeline.worker) timeline.draw();
  requestAnimationFrame(animate);
}

watch();
watchTemplates();
animate();
