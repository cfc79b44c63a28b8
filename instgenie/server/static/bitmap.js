// Decodes a picture file into a bitmap of bounded size. Used by worker threads, so that the page stays responsive.

const MAX_SIDE = 2048;

export async function decoded(file) {
  const full = await createImageBitmap(file);
  const { width, height } = full;
  return { width, height, bitmap: await fitted(full) };
}

async function fitted(full) {
  const scale = MAX_SIDE / Math.max(full.width, full.height);
  if (scale >= 1) return full;
  const size = { resizeWidth: Math.round(full.width * scale), resizeHeight: Math.round(full.height * scale) };
  const small = await createImageBitmap(full, { ...size, resizeQuality: "medium" });
  full.close();
  return small;
}
