// Asks the worker thread of the masks. It starts when it is first needed.

export class Helper {
  constructor() {
    this.waiting = new Map(); // by id of the request: its promise's {resolve, reject}
    this.count = 0;
    this.file = null; // of the picture that the worker has open
  }

  ask(act, given = {}) {
    this.worker ??= this.start();
    const id = this.count++;
    this.worker.postMessage({ id, act, ...given });
    return new Promise((resolve, reject) => this.waiting.set(id, { resolve, reject }));
  }

  start() {
    const worker = new Worker("/static/select/worker.js", { type: "module" });
    worker.onmessage = ({ data: { id, made, failure } }) => {
      const { resolve, reject } = this.waiting.get(id);
      this.waiting.delete(id);
      if (failure === undefined) resolve(made);
      else reject(new Error(failure));
    };
    return worker;
  }

  // Opens the picture, unless it is open already.
  open({ file }) {
    if (file === this.file) return;
    this.file = file;
    this.ask("open", { file }).catch(() => (this.file = null));
  }

  get isBusy() {
    return this.waiting.size > 0;
  }
}
