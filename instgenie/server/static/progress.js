// The line that tells how far a run of one or several edits is.
import { bytes, find, percent } from "./dom.js";

export class Progress {
  constructor(count) {
    this.steps = Array(count).fill(0); // the share of each edit's steps that it has taken
    this.numReceived = 0; // pictures
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
    this.show(position ? `Waiting: ${position} before you` : "Preparing", leftText(seconds_left));
  }

  step({ index, step, num_steps, seconds_left }) {
    this.steps[index] = step / num_steps;
    const share = this.steps.reduce((sum, one) => sum + one, 0) / this.steps.length;
    const isTold = index === 0 || this.steps[0] === 1; // edits of one run step together, mostly
    this.show(isTold ? `Step ${step} of ${num_steps}` : find("stage-name").textContent, leftText(seconds_left), share);
  }

  received({ share, num_bytes }) {
    this.bytes = num_bytes ?? this.bytes;
    if (!this.steps.every((one) => one === 1)) return;
    const which = this.steps.length > 1 ? ` ${this.numReceived + 1} of ${this.steps.length}` : "";
    this.show(`Receiving${which}`, `${percent(share)} of ${bytes(this.bytes)}`, share);
  }
}

// The server tells the time until the whole run is done, once it has measured a step.
function leftText(left) {
  if (!left) return "";
  const whole = Math.ceil(left);
  return `about ${whole < 100 ? `${whole} s` : `${Math.ceil(whole / 60)} min`} left`;
}
