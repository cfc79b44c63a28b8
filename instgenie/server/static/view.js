// The position of the picture in the window: zoom and pan. Draws nothing.

const MAX_SCALE = 16;
const MARGIN = 16;

export class View {
  constructor() {
    this.window = { width: 1, height: 1 };
    this.picture = { width: 1, height: 1 };
    this.scale = 1;
    this.x = this.y = 0; // position of the picture's corner in the window
  }

  get fitting() {
    const width = Math.max(this.window.width - 2 * MARGIN, 1) / this.picture.width;
    const height = Math.max(this.window.height - 2 * MARGIN, 1) / this.picture.height;
    return Math.min(width, height, MAX_SCALE);
  }

  fit() {
    this.scale = this.fitting;
    this.x = (this.window.width - this.picture.width * this.scale) / 2;
    this.y = (this.window.height - this.picture.height * this.scale) / 2;
  }

  // Zooms around the point (x, y) of the window, which stays in place.
  zoom(factor, x = this.window.width / 2, y = this.window.height / 2) {
    const smallest = Math.min(this.fitting / 2, 1);
    const scale = Math.min(Math.max(this.scale * factor, smallest), Math.max(MAX_SCALE, smallest));
    const [pictureX, pictureY] = this.toPicture(x, y);
    this.scale = scale;
    this.x = x - pictureX * scale;
    this.y = y - pictureY * scale;
    this.keepInside();
  }

  // Shows the picture at this scale: 1 is one pixel of the picture per pixel of the window.
  zoomTo(scale) {
    this.zoom(scale / this.scale);
  }

  pan(x, y) {
    this.x += x;
    this.y += y;
    this.keepInside();
  }

  // Keeps a part of the picture visible.
  keepInside() {
    const { width, height } = this.window;
    const least = 48;
    this.x = Math.min(Math.max(this.x, least - this.picture.width * this.scale), width - least);
    this.y = Math.min(Math.max(this.y, least - this.picture.height * this.scale), height - least);
  }

  toPicture(x, y) {
    return [(x - this.x) / this.scale, (y - this.y) / this.scale];
  }

  toWindow(x, y) {
    return [x * this.scale + this.x, y * this.scale + this.y];
  }
}
