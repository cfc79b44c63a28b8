// A worker thread for whole pictures. {file}: decodes it into a bitmap of bounded size. {file, type}: writes it as another
// type. Answers null if the file is not a picture.
import { decoded } from "./bitmap.js";

const JPEG_QUALITY = 0.92;

onmessage = async ({ data: { file, type } }) => {
  try {
    if (type) return postMessage(await written(file, type));
    const made = await decoded(file);
    postMessage(made, [made.bitmap]);
  } catch {
    postMessage(null);
  }
};

async function written(file, type) {
  const full = await createImageBitmap(file);
  const canvas = new OffscreenCanvas(full.width, full.height);
  const context = canvas.getContext("2d");
  context.fillStyle = "#fff"; // a JPEG has no transparency
  context.fillRect(0, 0, full.width, full.height);
  context.drawImage(full, 0, 0);
  full.close();
  return canvas.convertToBlob({ type, quality: JPEG_QUALITY });
}
