// The line that tells how far a run of one or several edits is.
import { bytes, find, percent } from "./dom.js";

export class Progress {
  constructor(count) {
    this.steps = Array(count).fill(0);
    this.show("Sending");
  }

  show(text, left = "", share = undefined) {
    find("stage-name").textContent = text;
    find("left").textContent = left;
    if (share === undefined) find("bar").removeAttribute("value");
    else find("bar").value = share;
  }

  queued({ position, seconds_left }) {
    if (Math.max(...this.steps)) return;
    this.show(position ? `Waiting: ${position} before you` : "Next in line", leftText(seconds_left));
  }

  step({ index, step, num_steps, seconds_left }) {
    this.steps[index] = step / num_steps;
    const share = this.steps.reduce((sum, one) => sum + one, 0) / this.steps.length;
    if (index === 0 || this.steps[0] === 1) this.show(`Step ${step} of ${num_steps}`, leftText(seconds_left), share);
    else find("bar").value = share;
  }

  received({ share, num_bytes }) {
    this.bytes = num_bytes ?? this.bytes;
    if (this.steps.every((one) => one === 1)) this.show("Receiving", `${percent(share)} of ${bytes(this.bytes)}`, share);
  }
}

const leftText = (left) => (left ? `about ${Math.max(1, Math.round(left))} s left` : "");
