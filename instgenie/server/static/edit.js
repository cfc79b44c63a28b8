// The edit page: connects picture, mask, prompt, run and results.
import { ask } from "./api.js";
import { Board } from "./board.js";
import { find, element, percent } from "./dom.js";
import { showFacts } from "./facts.js";
import { History } from "./history.js";
import { BoardInput } from "./input.js";
import { Mask } from "./mask.js";
import { openPicture, PictureError } from "./picture.js";
import { Prompts } from "./prompts.js";
import { runEdit } from "./run.js";
import { Select } from "./select/select.js";
import { ZoomField } from "./select/zoom.js";
import { Settings } from "./settings.js";

const SECONDS_BETWEEN_LOOKS = 1.5;
const TOOL_KEYS = { s: "select", b: "brush", e: "eraser", r: "box", l: "lasso", h: "hand" };
const DIRECT_KEYS = { i: "invert", "+": "zoom-in", "=": "zoom-in", "-": "zoom-out", 0: "fit", o: "open" };
const ZOOM = 1.4;

const board = new Board(find("board"));
const input = new BoardInput(board, painted, showSplit);
const select = new Select(board, input, { change, say, complain });
const zoomField = new ZoomField(find("zoom"), board);
const history = new History(find("strip"), showResult);
const prompts = new Prompts(find("prompt"), find("suggestions"), find("chips"));
const settings = new Settings(() => {});
let facts = null; // about the server
let result = null; // the one shown
let running = null; // abort controller of the current run

// the server

async function loadFacts() {
  facts = await (await ask("/page/facts")).json();
  find("server").textContent = facts.is_ready ? facts.model : "loading the model";
  find("server").dataset.state = facts.is_ready ? "ready" : "loading";
  settings.learn(facts.fields);
  if (!facts.is_ready) setTimeout(connect, SECONDS_BETWEEN_LOOKS * 1000);
}

async function connect() {
  const isFirst = !facts;
  try {
    await loadFacts();
  } catch (error) {
    find("server").textContent = error.message;
    find("server").dataset.state = "error";
    return;
  }
  if (!isFirst) return;
  prompts.learn(facts);
  find("examples").replaceChildren(...facts.examples.map(exampleButton));
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
  painted();
}

async function openFile(file, name = file.name || "picture") {
  find("picture-error").textContent = find("error").textContent = "";
  await connected;
  try {
    show(await openPicture(file, name, facts));
    return true;
  } catch (error) {
    if (!(error instanceof PictureError)) throw error;
    find(board.picture ? "error" : "picture-error").textContent = error.message;
    return false;
  }
}

function show(picture, mask = new Mask(picture.width, picture.height)) {
  find("empty").hidden = true;
  find("tools").hidden = find("board").hidden = find("zooming").hidden = false;
  board.open(picture, mask);
  select.use(input.tool === "select");
  board.resize();
  board.view.fit();
  find("result").hidden = true;
  history.mark(null);
  result = null;
  setMode("mask");
  painted();
}

// the mask

function painted() {
  const { mask } = board;
  say("");
  find("under").dataset.changes = mask.strokes.length;
  find("undo").disabled = !mask.strokes.length;
  find("redo").disabled = !mask.undone.length;
  board.redraw();
}

// Shows a message under the picture, or what is known of picture and mask.
function say(message) {
  const { mask, picture } = board;
  const share = mask.share;
  const size = `${picture.name}, ${picture.width} × ${picture.height}`;
  const state = share ? `${percent(share)} masked` : "nothing painted yet: paint, or select an object by a click";
  find("under").textContent = message || `${size}, ${state}`;
}

function change(act) {
  if (!board.picture || board.mode === "partial") return;
  setMode("mask");
  act(board.mask);
  painted();
}

function setTool(tool) {
  input.tool = tool;
  input.hideCursor();
  find("board").dataset.tool = tool;
  document.querySelector(`[name=tool][value=${tool}]`).checked = true;
  find("size").disabled = !input.paints;
  select.use(tool === "select");
  if (board.mode === "compare" && tool !== "hand") setMode("mask");
}

function setSize(value) {
  find("size").value = Math.min(Math.max(value, 1), 50);
  input.brush = find("size").value / 100;
}

function zoom(factor) {
  board.view.zoom(factor);
  board.redraw();
}

function fit() {
  board.view.fit();
  board.redraw();
}

// what the stage shows

function setMode(mode) {
  board.mode = mode;
  find("modes").hidden = !result || Boolean(running);
  for (const option of document.getElementsByName("mode")) option.checked = option.value === mode;
  find("compare").hidden = mode !== "compare";
  find("view").dataset.mode = mode;
  showSplit();
  board.redraw();
}

function showSplit() {
  find("split").value = board.split * 100;
}

function showResult(chosen) {
  if (running) return;
  if (chosen.picture !== board.picture) show(chosen.picture, chosen.mask);
  result = chosen;
  board.after = chosen.bitmap;
  setMode("compare");
  history.mark(chosen);
  find("result").hidden = false;
  find("result-name").textContent = chosen.prompt || "Result";
  showFacts(find("facts"), chosen.facts);
  const link = find("download");
  URL.revokeObjectURL(link.href);
  link.href = URL.createObjectURL(chosen.file);
  link.download = `${chosen.picture.name.replace(/\.\w+$/, "")}-${chosen.facts.seed}.png`;
}

function useAsSource() {
  const { file, width, height, bitmap, facts, picture } = result;
  show({ file, width, height, bitmap, name: `${picture.name.replace(/\.\w+$/, "")}-${facts.seed}.png` });
  find("board").focus();
}

// the run

async function run() {
  find("error").textContent = "";
  const { picture, mask } = board;
  const values = settings.read();
  const mistake = findMistake(values);
  if (mistake) return complain(...mistake);
  setRunning(new AbortController());
  const results = [];
  try {
    await runEdit({ picture, mask, settings: values }, {
      queued: (_, position) => showProgress(position ? `Waiting: ${position} before you` : "Next in line"),
      step: (index, step, of) => index === 0 && showProgress(`Step ${step} of ${of}`, step / of),
      partial: showPartial,
      completed: (made) => results.push({ ...made, picture, mask, prompt: values.prompt }),
    }, running.signal);
  } catch (error) {
    if (error.name !== "AbortError") complain(error.message, settings.idOf(error.param));
  } finally {
    setRunning(null);
  }
  for (const made of results.toReversed()) history.add(made);
  if (results.length) showResult(results[0]);
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

function setRunning(controller) {
  running = controller;
  find("run").hidden = Boolean(controller);
  find("progress").hidden = !controller;
  find("tools").inert = Boolean(controller);
  document.body.classList.toggle("running", Boolean(controller));
  result = null;
  find("result").hidden = true;
  setMode("mask");
  if (controller) showProgress("Sending");
}

function showProgress(text, share) {
  find("stage-name").textContent = text;
  if (share === undefined) find("bar").removeAttribute("value");
  else find("bar").value = share;
}

function showPartial(bitmap) {
  board.after = bitmap;
  setMode("partial");
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
  reuse: useAsSource,
};
for (const [id, act] of Object.entries(ON_CLICK)) find(id).addEventListener("click", act);

find("tools").addEventListener("change", ({ target }) => target.name === "tool" && setTool(target.value));
find("size").addEventListener("input", ({ target }) => setSize(target.value));
find("modes").addEventListener("change", ({ target }) => setMode(target.value));
find("split").addEventListener("input", ({ target }) => {
  board.split = target.value / 100;
  board.redraw();
});
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
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey) return withControl(event);
  if (event.altKey || event.target.matches("input:not([type=radio], [type=range]), textarea, select")) return;
  const key = event.key.toLowerCase();
  if (!board.picture || running) return;
  if (key in TOOL_KEYS) setTool(TOOL_KEYS[key]);
  else if (key in DIRECT_KEYS) find(DIRECT_KEYS[key]).click();
  else if (key === "g") find(event.shiftKey ? "shrink" : "grow").click();
  else if (key === "1") zoomField.set(1);
  else if (key === "[" || key === "]") setSize(Number(find("size").value) + (key === "]" ? 2 : -2));
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

setTool("brush");
const connected = connect(); // then the server's limits are known
