// The edit page: connects the server, the picture, the mask, the settings, the run and the results.
import { ask } from "./api.js";
import { Board } from "./board.js";
import { Controls } from "./controls.js";
import { bytes, element, find, percent, press } from "./dom.js";
import { BoardInput } from "./input.js";
import { Loras } from "./loras.js";
import { Mask } from "./mask.js";
import { openPicture, PictureError } from "./picture.js";
import { maskPng, textIn } from "./png.js";
import { Progress } from "./progress.js";
import { Prompts } from "./prompts.js";
import { nameOf, PNG_KEYWORD, Results, signed } from "./results.js";
import { runEdit } from "./run.js";
import { restore, Saved } from "./saved.js";
import { Select } from "./select/select.js";
import { ZoomField } from "./select/zoom.js";
import { Settings } from "./settings.js";
import { Stage } from "./stage.js";
import { Toolbar } from "./toolbar.js";

const SECONDS_BETWEEN_LOOKS = 1.5;
const MS_BEFORE_KEEPING = 400;
const ZOOM = 1.4;
const REMOVAL = "an empty background"; // the prompt of a removal where the model suggests none

const board = new Board(find("board"));
const input = new BoardInput(board, painted, () => stage.showSplit());
const select = new Select(board, input, { change, say: describe, complain });
const zoomField = new ZoomField(find("zoom"), board);
const stage = new Stage(board, showResult);
const toolbar = new Toolbar(input, useTool);
const results = new Results({ onChoose: showResult, onForget: ({ id }) => saved.forget(id), say });
const prompts = new Prompts(find("prompt"), find("suggestions"), find("chips"));
const adapters = [new Loras(later(keepSettings)), new Controls(later(keepSettings))]; // that settings read and write
const settings = new Settings(later(keepSettings));
const saved = new Saved();
let facts = null; // about the server
let running = null; // abort controller of the current run

// the server

async function loadFacts() {
  facts = await (await ask("/page/facts")).json();
  showServer(facts.is_ready ? facts.model : "loading the model", facts.is_ready ? "ready" : "loading");
  settings.learn(facts.fields);
  for (const one of adapters) one.load().catch(() => {}); // nothing waits for it; without an answer none are offered
  prompts.check(facts.words);
  const { num_ready = 0, num = 0 } = facts.warmed ?? {};
  find("warmed").textContent = num_ready < num ? `Getting the examples ready: ${num_ready} of ${num}` : "";
  if (!facts.is_ready || num_ready < num) setTimeout(connect, SECONDS_BETWEEN_LOOKS * 1000);
}

function showServer(text, state) {
  find("server").textContent = text;
  find("server").dataset.state = state;
}

async function connect() {
  const isFirst = !facts;
  const wasLost = find("server").dataset.state === "error";
  try {
    await loadFacts();
  } catch (error) {
    showServer(error.message, "error");
    setTimeout(connect, SECONDS_BETWEEN_LOOKS * 1000);
    if (isFirst) await new Promise(() => {}); // a later look goes on
    return;
  }
  if (wasLost) say("The server is back.");
  if (!isFirst) return;
  prompts.learn(facts);
  find("examples").replaceChildren(...facts.examples.map(exampleButton));
  find("or-example").hidden = !facts.examples.length;
  started();
}

// the picture

function exampleButton(example) {
  const image = element("img", { src: `/static/examples/${example.name}.thumb.webp`, alt: "", width: 96, height: 96 });
  const label = element("span", { textContent: example.name });
  return element("li", {}, element("button", { type: "button", onclick: () => openExample(example) }, image, label));
}

async function openExample({ picture, mask, prompts, seed }) {
  const [file, alpha] = await Promise.all(
    [picture, mask].map(async (path) => (await ask(`/static/examples/${path}`)).blob()),
  );
  if (!(await openFile(file, picture))) return;
  board.mask.add({ kind: "image", alpha: await createImageBitmap(alpha) });
  settings.write({ prompt: prompts[0], seed }, { only: true });
  keepSettings();
  painted();
}

async function openFile(file, name = file.name || "picture") {
  find("picture-error").textContent = find("error").textContent = "";
  await connected;
  try {
    show(await openPicture(file, name, facts));
  } catch (error) {
    if (!(error instanceof PictureError)) throw error;
    find(board.picture ? "error" : "picture-error").textContent = error.message;
    return false;
  }
  const text = await textIn(file, PNG_KEYWORD);
  if (text) offer("This picture carries the settings that made it.", "Use them", () => useValues(JSON.parse(text)));
  return true;
}

function show(picture, mask = new Mask(picture.width, picture.height)) {
  find("zooming").hidden = false;
  stage.open(picture, mask);
  select.use(input.tool === "select");
  results.show(null);
  say("");
  saved.keep({ picture: { file: picture.file, name: picture.name } });
  painted();
}

// the mask

function painted() {
  const { mask } = board;
  describe("");
  find("under").dataset.changes = mask.strokes.length;
  find("undo").disabled = !mask.strokes.length;
  find("redo").disabled = !mask.undone.length;
  if (mask.share) find("error").textContent = "";
  board.redraw();
  keepMask();
}

// Shows a message under the picture, or what is known of picture and mask.
function describe(message) {
  const { mask, picture } = board;
  const share = mask.share;
  const size = `${picture.name}, ${picture.width} × ${picture.height}`;
  const state = share ? `${percent(share)} painted` : `Nothing painted yet: paint, or ${press} an object with Select`;
  find("under").textContent = find("under").title = message || `${state} · ${size}`;
}

function change(act) {
  if (!board.picture || running) return;
  stage.setMode("mask");
  act(board.mask);
  painted();
}

function useTool(tool) {
  select.use(tool === "select");
  if (stage.mode !== "mask" && stage.mode !== "partial" && tool !== "hand" && board.picture) stage.setMode("mask");
}

function zoom(factor) {
  board.view.zoom(factor);
  board.redraw();
}

function fit() {
  board.view.fit();
  board.redraw();
}

// results

function showResult(chosen, { all = false } = {}) {
  if (chosen.picture !== board.picture) show(chosen.picture, chosen.mask);
  stage.show(chosen, { all });
  results.show(chosen);
}

function useAsSource() {
  const { shown } = results;
  const { file, width, height, bitmap } = shown;
  show({ file, width, height, bitmap, name: nameOf(shown, "png") });
  find("board").focus();
}

// Puts back what made the result: settings, seed, and the mask where it has changed since.
async function useSettings() {
  const { values, facts, maskFile } = results.shown;
  const alpha = await createImageBitmap(maskFile, { resizeWidth: board.mask.canvas.width, resizeHeight: board.mask.canvas.height, resizeQuality: "pixelated" });
  change((mask) => mask.add({ kind: "image", alpha }));
  useValues({ ...values, seed: String(facts.seed), n: "1" });
}

function useValues(values) {
  settings.write(values);
  keepSettings();
  prompts.check();
  say("Seed and settings are those of the result.");
}

// what the browser keeps

async function restoreSession() {
  const { session, results: kept } = await saved.open();
  settings.write(session.values ?? {});
  settings.query = location.hash.slice(1);
  prompts.remember(...(session.prompts ?? []));
  prompts.check();
  if (session.picture && !board.picture) await restore({ session, kept }, { open: openFile, board, results, painted }).catch(() => {});
  if (saved.isLost) warn();
  find("strip").dataset.state = "restored";
}

function keepSettings() {
  const { query } = settings;
  history.replaceState(null, "", query ? `#${query}` : location.pathname);
  saved.keep({ values: settings.read() });
}

const keepMask = later(async () => {
  const { mask } = board;
  await saved.keep({ mask: await maskPng(mask, mask.canvas.width, mask.canvas.height) });
  if (saved.isLost) warn();
});

function warn() {
  say("The browser keeps nothing of this page: a reload loses picture, mask and results.");
  window.onbeforeunload = (event) => event.preventDefault();
}

function later(act) {
  let timer;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(act, MS_BEFORE_KEEPING);
  };
}

// the run

async function run(values = settings.read()) {
  find("error").textContent = "";
  say("");
  const { picture, mask } = board;
  const mistake = findMistake(values);
  if (mistake) return complain(...mistake);
  const count = Number(values.n ?? 1);
  const { share } = mask;
  const before = { result: stage.result, mode: stage.mode };
  const made = [];
  const at = Date.now();
  setRunning(new AbortController());
  stage.setMode("mask");
  prompts.remember(values.prompt);
  saved.keep({ prompts: prompts.recent });
  if (count > 1) stage.makeCells(count);
  const progress = new Progress(count);
  try {
    const maskFile = await maskPng(mask, picture.width, picture.height);
    progress.show("Sending", bytes(picture.file.size));
    await runEdit({ picture, maskFile, values }, {
      queued: (event) => progress.queued(event),
      step: (event) => progress.step(event),
      received: (event) => progress.received(event),
      partial: (event) => stage.result || stage.showPartial(event, count),
      completed: (one) => {
        progress.numReceived++;
        if (count > 1 && !stage.result) stage.showPartial({ ...one, index: one.facts.index }, count);
        made.push({ id: `${at}-${one.facts.index}`, at, ...one, file: signed(one, values), picture, mask, maskFile, share, values, variants: made });
      },
    }, running.signal);
  } catch (error) {
    if (error.name !== "AbortError") complain(error.message, settings.idOf(error.param));
    if (error.code === "unreachable") {
      showServer(error.message, "error");
      connect();
    }
  }
  setRunning(null);
  made.sort((one, other) => one.facts.index - other.facts.index);
  for (const one of made.toReversed()) results.add(one);
  for (const one of made) saved.add({ ...one, bitmap: undefined, url: undefined, mask: undefined, variants: made.map(({ id }) => id), picture: { file: picture.file, name: picture.name } });
  if (made.length) showResult(made[0], { all: true });
  else if (!stage.result && before.result?.picture === board.picture) {
    stage.show(before.result);
    results.show(before.result);
    stage.setMode(before.mode);
  } else if (!stage.result) stage.setMode("mask");
}

function remove() {
  find("prompt").value = facts?.prompts.remove?.[0] ?? REMOVAL;
  prompts.check();
  const { strength, ...values } = settings.read(); // the server knows a strength that suits
  run({ ...values, masked_content: "surroundings" });
}

// Returns a message, and the field to correct if there is one; undefined if everything is fine.
function findMistake({ prompt }) {
  if (!board.picture) return ["Open a picture first."];
  if (!board.mask.pixels.includes(1)) return ["Nothing is painted: paint what should change, or invert the empty mask to change everything."];
  if (!prompt) return ["Say what should be there.", "prompt"];
  return settings.mistake();
}

function complain(message, field) {
  find("error").textContent = message;
  if (field) find(field).focus();
}

function say(text) {
  find("notice").textContent = text;
}

function offer(text, name, act) {
  find("notice").replaceChildren(`${text} `, element("button", { type: "button", className: "link", textContent: name, onclick: act }));
}

function explain(id) {
  find(`about-${id}`).ariaExpanded = String(!(find(`${id}-help`).hidden = !find(`${id}-help`).hidden));
}

function setRunning(controller) {
  running = controller;
  find("run").hidden = find("remove").hidden = Boolean(controller);
  find("progress").hidden = !controller;
  find("tools").inert = Boolean(controller);
  document.body.classList.toggle("running", Boolean(controller));
  if (!controller) return;
  find("view").scrollIntoView({ block: "nearest" }); // on a phone the button is below the picture
  stage.result = null; // choosing a result during the run sets it, and the run goes on unseen
  results.show(null);
}

// events

const ON_CLICK = {
  undo: () => change((mask) => mask.undo()),
  redo: () => change((mask) => mask.redo()),
  invert: () => change((mask) => mask.add({ kind: "invert" })),
  clear: () => change((mask) => mask.add({ kind: "clear" })),
  "zoom-in": () => zoom(ZOOM),
  "zoom-out": () => zoom(1 / ZOOM),
  fit,
  open: () => find("file").click(),
  choose: () => find("file").click(),
  cancel: () => running?.abort(),
  remove,
  reuse: useAsSource,
  again: useSettings,
  "about-loras": () => explain("loras"),
  "about-controls": () => explain("controls"),
  forget: () => (results.forgetAll(), (stage.result = null), stage.setMode("mask")),
};
for (const [id, act] of Object.entries(ON_CLICK)) find(id).addEventListener("click", act);

find("form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!running) run();
});
find("file").addEventListener("change", ({ target }) => {
  if (target.files[0]) openFile(target.files[0]);
  target.value = "";
});

document.addEventListener("dragover", (event) => event.preventDefault());
document.addEventListener("drop", (event) => {
  event.preventDefault();
  const file = event.dataTransfer.files[0];
  if (file && !running) openFile(file);
});
document.addEventListener("paste", (event) => {
  const file = event.clipboardData.files[0];
  if (file && !running) openFile(file);
});
document.addEventListener("keyup", ({ key }) => key === "\\" && stage.holdOriginal(false));
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey) return withControl(event);
  if (event.altKey || event.target.matches("input:not([type=radio], [type=range]), textarea, select")) return;
  if (event.key === "\\") stage.holdOriginal(true);
  if (!board.picture || running) return;
  if (event.key === "1") zoomField.set(1);
  else toolbar.key(event);
});

function withControl(event) {
  const key = event.key.toLowerCase();
  if (key === "enter") {
    event.preventDefault();
    if (!running) run();
  } else if (!event.target.matches("input[type=number], textarea") && (key === "z" || key === "y")) {
    event.preventDefault();
    if (!running) find(key === "y" || event.shiftKey ? "redo" : "undo").click();
  }
}

let started;
const connected = new Promise((resolve) => (started = resolve)); // then the server's limits are known
connect();
connected.then(restoreSession);
