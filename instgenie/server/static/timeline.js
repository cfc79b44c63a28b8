// A worker's last seconds. Each job is a bar from joining the batch to leaving it; below are the steps, as high as their
// batches are large. Time runs to the right; now is the right edge.

const MIN_LANES = 4;
const GAP = 2;
const STEPS_HEIGHT = 26;
const ROOM = 8;
const END = 4; // width of the mark of a job that made way for another

export class Timeline {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.steps = [];
    this.lanes = new Map(); // lane of each bar, by job and start
    new ResizeObserver(() => this.resize()).observe(canvas);
  }

  resize() {
    const ratio = Math.min(devicePixelRatio, 2);
    Object.assign(this.canvas, { width: this.canvas.clientWidth * ratio, height: this.canvas.clientHeight * ratio });
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    if (this.worker) this.draw();
  }

  // Each step arrives once; a bar arrives as long as it is visible.
  update(worker, { now, window, max_batch_size }) {
    Object.assign(this, { worker, window, maxBatch: max_batch_size });
    this.offset = now - performance.now() / 1000;
    this.steps = [...this.steps, ...worker.steps].filter((step) => step.ended > now - window);
    this.placeBars(worker.bars, now);
    this.numLanes = Math.max(MIN_LANES, ...[...this.lanes.values()].map((lane) => lane + 1));
  }

  // A bar keeps its first lane, the lowest that was free.
  placeBars(bars, now) {
    const before = this.lanes;
    this.lanes = new Map();
    for (const bar of bars) {
      const taken = new Set(bars.filter((other) => overlap(bar, other, now)).map((other) => this.lanes.get(nameOf(other))));
      let lane = before.get(nameOf(bar)) ?? 0;
      while (taken.has(lane)) lane++;
      this.lanes.set(nameOf(bar), lane);
    }
  }

  draw() {
    const { canvas, context, worker, window, offset } = this;
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    const now = performance.now() / 1000 + offset;
    const x = (time) => width - ((now - time) / window) * width;
    const style = getComputedStyle(canvas);
    const [accent, dense, quiet, madeWay] = ["--accent", "--dense", "--quiet", "--made-way"].map((name) => style.getPropertyValue(name));
    context.clearRect(0, 0, width, height);
    const laneHeight = (height - STEPS_HEIGHT - 2 * ROOM) / this.numLanes;
    for (const bar of worker.bars) {
      const [left, right] = [x(bar.joined), x(bar.left ?? now)];
      const top = ROOM + this.lanes.get(nameOf(bar)) * laneHeight;
      context.fillStyle = bar.is_cached ? accent : dense;
      context.beginPath();
      context.roundRect(left, top, Math.max(right - left, 2), Math.max(laneHeight - GAP, 2), 3);
      context.fill();
      if (bar.made_way) {
        context.fillStyle = madeWay;
        context.fillRect(Math.max(right - END, left), top, END, Math.max(laneHeight - GAP, 2));
      }
    }
    context.fillStyle = quiet;
    for (const { ended, seconds, batch_size } of this.steps) {
      const size = (STEPS_HEIGHT - ROOM) * Math.min(batch_size / this.maxBatch, 1);
      context.fillRect(x(ended - seconds), height - ROOM / 2 - size, Math.max((seconds / window) * width - 0.5, 0.5), size);
    }
  }
}

const nameOf = ({ job, joined }) => `${job} ${joined}`;

const overlap = (one, other, now) =>
  one !== other && one.joined < (other.left ?? now) && other.joined < (one.left ?? now);
