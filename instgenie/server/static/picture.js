// Opens picture files: checks them, reads their size, and scales them down to paint on. The server gets the file itself.

const TYPES = ["image/png", "image/jpeg", "image/webp"];

export class PictureError extends Error {}

export async function openPicture(file, name, limits) {
  if (!TYPES.includes(file.type)) {
    throw new PictureError(`${name} is not a picture this server accepts: choose a PNG, JPEG or WebP file.`);
  }
  if (file.size > limits.max_body_bytes) {
    throw new PictureError(`${name} is too large: the server accepts up to ${Math.floor(limits.max_body_bytes / 2 ** 20)} MiB.`);
  }
  const { width, height, bitmap } = await shrunk(file).catch(() => {
    throw new PictureError(`${name} cannot be opened: the file is damaged or not a picture.`);
  });
  if (width * height > limits.max_pixels) {
    const [has, may] = [width * height, limits.max_pixels].map((pixels) => (pixels / 1e6).toFixed(1));
    throw new PictureError(`${name} has ${has} megapixels: the server accepts up to ${may} (its option --max-megapixels).`);
  }
  return { file, name, width, height, bitmap };
}

// Decodes and scales down in a thread of its own, so that the page stays responsive.
export const shrunk = (file) => worked({ file });

export const asJpeg = (file) => worked({ file, type: "image/jpeg" });

function worked(task) {
  const worker = new Worker("/static/shrink.js", { type: "module" });
  return new Promise((resolve, reject) => {
    worker.onmessage = ({ data }) => (data ? resolve(data) : reject(new Error("not decodable")));
    worker.onerror = reject;
    worker.postMessage(task);
  }).finally(() => worker.terminate());
}

export function thumbnail(bitmap, side) {
  const scale = side / Math.min(bitmap.width, bitmap.height);
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = side;
  const [width, height] = [bitmap.width * scale, bitmap.height * scale];
  canvas.getContext("2d").drawImage(bitmap, (side - width) / 2, (side - height) / 2, width, height);
  return canvas;
}

// A canvas with the whole bitmap, at most `side` pixels wide and high.
export function contained(bitmap, side) {
  const scale = Math.min(side / Math.max(bitmap.width, bitmap.height), 1);
  const canvas = document.createElement("canvas");
  Object.assign(canvas, { width: Math.round(bitmap.width * scale), height: Math.round(bitmap.height * scale) });
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas;
}
