// Pictures from files: checked, measured, and made small enough to paint on. The file itself is what the server gets.

const TYPES = ["image/png", "image/jpeg", "image/webp"];
const MAX_SIDE = 2048; // of what is shown

export class PictureError extends Error {}

export async function openPicture(file, name, limits) {
  if (!TYPES.includes(file.type)) {
    throw new PictureError(`${name} is not a picture this server takes: choose a PNG, JPEG or WebP file.`);
  }
  if (file.size > limits.max_body_bytes) {
    throw new PictureError(`${name} is too large: the server takes ${Math.floor(limits.max_body_bytes / 2 ** 20)} MiB.`);
  }
  const { width, height } = await measure(file, name);
  if (width * height > limits.max_pixels) {
    const [has, may] = [width * height, limits.max_pixels].map((pixels) => (pixels / 1e6).toFixed(1));
    throw new PictureError(`${name} has ${has} megapixels: the server takes up to ${may}.`);
  }
  return { file, name, width, height, bitmap: await shown(file, width, height) };
}

async function measure(file, name) {
  const image = new Image();
  image.src = URL.createObjectURL(file);
  try {
    await new Promise((resolve, reject) => Object.assign(image, { onload: resolve, onerror: reject }));
    return { width: image.naturalWidth, height: image.naturalHeight };
  } catch {
    throw new PictureError(`${name} cannot be opened: the file is damaged or not a picture.`);
  } finally {
    URL.revokeObjectURL(image.src);
  }
}

export function shown(file, width, height) {
  const scale = Math.min(1, MAX_SIDE / Math.max(width, height));
  if (scale === 1) return createImageBitmap(file);
  return createImageBitmap(file, {
    resizeWidth: Math.round(width * scale),
    resizeHeight: Math.round(height * scale),
    resizeQuality: "medium",
  });
}

export function thumbnail(bitmap, side) {
  const scale = side / Math.min(bitmap.width, bitmap.height);
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = side;
  const [width, height] = [bitmap.width * scale, bitmap.height * scale];
  canvas.getContext("2d").drawImage(bitmap, (side - width) / 2, (side - height) / 2, width, height);
  return canvas;
}
