// Keeps picture, mask, settings and results in the browser, so that a reload loses nothing. Each tab has a session; a new
// tab goes on with the last one that no other tab uses. Where the browser keeps nothing, `isLost` says so.

import { shrunk } from "./picture.js";

const NAME = "instgenie";
const SESSIONS = "sessions";
const RESULTS = "results";
const OWN = "instgenie.session"; // the session of this tab, known over a reload
const MS_TO_LEAVE = 3000; // after a reload the old page may hold its lock for a moment

export class Saved {
  constructor() {
    this.isLost = false;
    this.session = null; // {id, changed, picture, mask, values, prompts}
    this.writing = Promise.resolve();
  }

  // Returns the session to go on with, {} if there is none, and its results, oldest first.
  async open() {
    try {
      this.database = await opened();
      const sessions = await this.ask(SESSIONS, "readonly", (store) => store.getAll());
      sessions.sort((one, other) => other.changed - one.changed);
      const own = sessions.find(({ id }) => id === sessionStorage.getItem(OWN));
      if (own && (await isLeft(own.id))) this.session = own;
      for (const session of sessions) if (!this.session && (await isFree(session.id))) this.session = session;
      this.session ??= { id: crypto.randomUUID?.() ?? String(Math.random()) };
      sessionStorage.setItem(OWN, this.session.id);
      hold(this.session.id);
      const results = await this.ask(RESULTS, "readonly", (store) => store.getAll());
      return { session: this.session, results: results.filter(({ session }) => session === this.session.id) };
    } catch {
      this.isLost = true;
      return { session: {}, results: [] };
    }
  }

  // Changes parts of the session.
  keep(parts) {
    if (this.session) Object.assign(this.session, parts, { changed: Date.now() });
    return this.write(SESSIONS, (store) => store.put(this.session));
  }

  add(result) {
    return this.write(RESULTS, (store) => store.put({ ...result, session: this.session.id }));
  }

  forget(id) {
    return this.write(RESULTS, (store) => store.delete(id));
  }

  // Writes one after the other, so that the last one wins.
  write(name, act) {
    if (!this.database) return Promise.resolve();
    this.writing = this.writing.then(() => this.ask(name, "readwrite", act)).then(
      () => (this.isLost = false),
      () => (this.isLost = true),
    );
    return this.writing;
  }

  ask(name, mode, act) {
    return new Promise((resolve, reject) => {
      const transaction = this.database.transaction(name, mode);
      const request = act(transaction.objectStore(name));
      transaction.oncomplete = () => resolve(request.result);
      transaction.onerror = transaction.onabort = () => reject(transaction.error);
    });
  }
}

function opened() {
  return new Promise((resolve, reject) => {
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () => {
      request.result.createObjectStore(SESSIONS, { keyPath: "id" });
      request.result.createObjectStore(RESULTS, { keyPath: "id" });
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = request.onblocked = () => reject(request.error);
  });
}

// A tab holds a lock on its session. Without locks (insecure pages have none) tabs share their last session.
async function isFree(id) {
  if (!navigator.locks) return true;
  return navigator.locks.request(`${NAME}.${id}`, { ifAvailable: true }, (lock) => Boolean(lock));
}

// Waits until the page before the reload has let go; a copy of a tab that is still open never does.
async function isLeft(id) {
  if (!navigator.locks) return true;
  const options = { signal: AbortSignal.timeout(MS_TO_LEAVE) };
  return navigator.locks.request(`${NAME}.${id}`, options, () => true).catch(() => false);
}

function hold(id) {
  navigator.locks?.request(`${NAME}.${id}`, () => new Promise(() => {}));
}

// Puts a session back on the page: its picture, its mask, its results with the pictures they were made from.
export async function restore({ session, kept }, { open, board, results, painted }) {
  if (!(await open(session.picture.file, session.picture.name))) return;
  if (session.mask) {
    const alpha = await createImageBitmap(session.mask);
    board.mask.add({ kind: "image", alpha });
    painted();
  }
  const pictures = [board.picture]; // results of one picture share it
  const byId = new Map();
  kept.sort((one, other) => one.at - other.at || other.facts.index - one.facts.index);
  for (const one of kept) {
    const { file, name } = one.picture;
    let picture = pictures.find((known) => known.file.size === file.size && known.name === name);
    if (!picture) pictures.push((picture = { file, name, ...(await shrunk(file)) }));
    byId.set(one.id, { ...one, ...(await shrunk(one.file)), picture, mask: picture === board.picture ? board.mask : undefined });
  }
  for (const one of byId.values()) one.variants = one.variants.map((id) => byId.get(id)).filter(Boolean);
  for (const one of byId.values()) results.add(one);
}
