// A worker thread that decodes a file into a bitmap of bounded size. Answers null if the file is not a picture.

const MAX_SIDE = 2048;

onmessage = async ({ data: file }) => {
  try {
    const full = await createImageBitmap(file);
    const { width, height } = full;
    const bitmap = await fitted(full);
    postMessage({ width, height, bitmap }, [bitmap]);
  } catch {
    postMessage(null);
  }
};

async function fitted(full) {
  const scale = MAX_SIDE / Math.max(full.width, full.height);
  if (scale >= 1) return full;
  const size = { resizeWidth: Math.round(full.width * scale), resizeHeight: Math.round(full.height * scale) };
  const small = await createImageBitmap(full, { ...size, resizeQuality: "medium" });
  full.close();
  return small;
}
