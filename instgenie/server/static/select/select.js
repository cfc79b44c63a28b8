// The tools that change the mask as a whole: select an object, grow, shrink, load, save.
import { find } from "../dom.js";
import { maskPng } from "../png.js";
import { Ants } from "./ants.js";
import { Helper } from "./helper.js";

const PREVIEW_AFTER = 120; // milliseconds that the mouse rests
const STEP = 0.008; // of growing, as a share of the picture's shorter side
const MANY = 4; // steps with the Shift key

export class Select {
  // `change` makes a change to the mask, `say` shows a message, `complain` an error.
  constructor(board, input, { change, say, complain }) {
    Object.assign(this, { board, input, change, say, complain });
    this.helper = new Helper();
    this.ants = new Ants(find("ants"), board);
    this.sessions = 0; // a session is one object and the clicks that made its outline
    input.onPick = (points, isOutside) => this.pick(points, isOutside !== this.subtracts);
    input.onHover = (point) => this.hover(point);
    find("grow").addEventListener("click", ({ shiftKey }) => this.grow(shiftKey ? MANY : 1));
    find("shrink").addEventListener("click", ({ shiftKey }) => this.grow(shiftKey ? -MANY : -1));
    find("save-mask").addEventListener("click", () => this.save());
    find("load-mask").addEventListener("click", () => find("mask-file").click());
    find("mask-file").addEventListener("change", ({ target }) => {
      if (target.files[0]) this.load(target.files[0]);
      target.value = "";
    });
  }

  get subtracts() {
    return find("subtract").checked;
  }

  // Gets ready for clicks, or puts everything away.
  use(isUsed) {
    find("signs").hidden = !isUsed;
    this.hover(null);
    if (isUsed && this.board.picture) this.helper.open(this.board.picture);
  }

  // selecting

  // One point is a click; several are a box or a loop around the object. A click that adds near the object selected
  // last, or subtracts from it, makes its outline better; any other selects or removes another object.
  async pick(points, isOutside) {
    const { mask, picture } = this.board;
    const last = this.last;
    const isHint = points.length > 1;
    const click = { x: points[0][0], y: points[0][1], inside: !isOutside };
    const goesOn = !isHint && last && !last.erase && (isOutside ? covers(last, click) : isWithin(click, last.window));
    const erase = isOutside && !goesOn;
    const clicks = goesOn ? [...last.clicks, click] : isHint ? [] : [{ ...click, inside: true }];
    const hint = goesOn ? last.hint : isHint ? points : null;
    const before = goesOn ? { window: last.window, width: last.width, height: last.height, data: last.data } : null;
    const found = await this.work("Finding the outline", () => this.ask("find", { clicks, hint, before }));
    if (!found || !this.isSame(picture, mask, last)) return;
    if (!found.data.includes(1)) return this.say("No object was found there: click on it, or draw a box around it.");
    this.change(() => mask.add({ kind: "outline", session: goesOn ? last.session : ++this.sessions, clicks, hint, erase, ...found }));
  }

  get last() {
    const stroke = this.board.mask.strokes.at(-1);
    return stroke?.kind === "outline" ? stroke : null;
  }

  // Is the mask as it was when the work began? What was made for another one is thrown away.
  isSame(picture, mask, last) {
    return picture === this.board.picture && mask === this.board.mask && last === this.last;
  }

  hover(point) {
    clearTimeout(this.resting);
    this.resting = null; // an outline that is on its way is not shown
    if (this.ants.preview) this.showPreview(null);
    if (point) this.resting = setTimeout(() => this.preview(point), PREVIEW_AFTER);
  }

  async preview(point) {
    if (!this.board.picture || this.board.mode !== "mask") return;
    if (this.helper.isBusy) return this.hover(point); // looks again a moment later
    const wanted = this.resting;
    const clicks = [{ x: point[0], y: point[1], inside: true }];
    const found = await this.ask("find", { clicks, hint: null, before: null }).catch(() => null);
    if (found && wanted === this.resting) this.showPreview(found.path);
  }

  showPreview(path) {
    this.ants.preview = path;
    this.ants.update();
  }

  ask(act, given) {
    this.helper.open(this.board.picture);
    return this.helper.ask(act, given);
  }

  async work(text, act) {
    clearTimeout(this.resting);
    this.resting = null;
    find("view").ariaBusy = "true";
    this.say(`${text} …`);
    try {
      return await act();
    } catch {
      this.complain("The outline tool failed: reload the page, or paint with the brush.");
      return null;
    } finally {
      find("view").ariaBusy = "false";
      this.say("");
    }
  }

  // growing and shrinking

  async grow(steps) {
    const { picture, mask } = this.board;
    if (!picture) return;
    const step = STEP * Math.min(picture.width, picture.height) * mask.scale; // pixels of the mask's canvas
    const radius = Math.sign(steps) * Math.max(Math.round(Math.abs(steps) * step), 1);
    const count = mask.strokes.length;
    const { width, height } = mask.canvas;
    const pixels = { width, height, data: mask.pixels };
    const made = await this.work(steps > 0 ? "Growing" : "Shrinking", () => this.helper.ask("grow", { pixels, radius }));
    if (!made || mask !== this.board.mask || count !== mask.strokes.length) return;
    this.change(() => mask.add({ kind: "pixels", ...made }));
  }

  // files

  async save() {
    const { mask, picture } = this.board;
    const link = document.createElement("a");
    link.href = URL.createObjectURL(await maskPng(mask, picture.width, picture.height));
    link.download = `${picture.name.replace(/\.\w+$/, "")}-mask.png`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
  }

  async load(file) {
    const { mask, picture } = this.board;
    const size = { width: mask.canvas.width, height: mask.canvas.height };
    const given = { file, picture: { width: picture.width, height: picture.height }, size };
    const made = await this.helper.ask("read", given).catch(() => null);
    if (!made) return this.complain(`${file.name} cannot be opened: the file is damaged or not a picture.`);
    if (made.wrong) {
      const [width, height] = made.wrong;
      return this.complain(`${file.name} has ${width} × ${height} pixels: a mask of this picture has ${picture.width} × ${picture.height}.`);
    }
    if (mask === this.board.mask) this.change(() => mask.add({ kind: "pixels", ...made }));
  }
}

function covers({ window, width, height, data }, { x, y }) {
  const [column, row] = [((x - window.x) / window.width) * width, ((y - window.y) / window.height) * height].map(Math.floor);
  return column >= 0 && row >= 0 && column < width && row < height && data[row * width + column] === 1;
}

const isWithin = ({ x, y }, window) =>
  x >= window.x && y >= window.y && x <= window.x + window.width && y <= window.y + window.height;
