// PNG files. Writes a mask as the API expects it: the picture's size, alpha 0 where masked. With one bit per pixel, the
// mask of a large photograph takes a few kilobytes and needs no canvas of that size. Puts texts into files and finds them.

const PALETTE = [0, 0, 0, 0, 0, 0]; // kept, masked: the colour does not matter
const ALPHA = [255, 0];

export async function maskPng(mask, width, height) {
  const { pixels, canvas } = mask;
  const header = new DataView(new ArrayBuffer(13));
  header.setUint32(0, width);
  header.setUint32(4, height);
  header.setUint8(8, 1); // bits per pixel
  header.setUint8(9, 3); // colours from a palette
  const rows = stretched(pixels, canvas.width, canvas.height, width, height);
  return new Blob(
    [
      Uint8Array.of(137, 80, 78, 71, 13, 10, 26, 10),
      chunk("IHDR", new Uint8Array(header.buffer)),
      chunk("PLTE", Uint8Array.from(PALETTE)),
      chunk("tRNS", Uint8Array.from(ALPHA)),
      chunk("IDAT", await deflated(rows)),
      chunk("IEND", new Uint8Array()),
    ],
    { type: "image/png" },
  );
}

// Returns rows of bits, each after its filter byte 0. Rows that repeat a line of the mask are copied.
function stretched(pixels, fromWidth, fromHeight, width, height) {
  const stride = 1 + Math.ceil(width / 8);
  const rows = new Uint8Array(stride * height);
  let last = -1;
  for (let y = 0; y < height; y++) {
    const line = Math.floor(((y + 0.5) * fromHeight) / height);
    if (line === last) {
      rows.copyWithin(y * stride, (y - 1) * stride, y * stride);
      continue;
    }
    last = line;
    for (let x = 0; x < width; x++) {
      const masked = pixels[line * fromWidth + Math.floor(((x + 0.5) * fromWidth) / width)];
      rows[y * stride + 1 + (x >> 3)] |= masked << (7 - (x & 7));
    }
  }
  return rows;
}

const START = 8 + 25; // signature and IHDR
const TEXT = "iTXt";
const MAX_SEARCHED = 65536; // texts of this page come before the pixels

// Returns the file with a text inside, as an international text chunk behind its header.
export function withText(file, keyword, text) {
  const data = new TextEncoder().encode(`${keyword}\0\0\0\0\0${text}`);
  return new Blob([file.slice(0, START), chunk(TEXT, data), file.slice(START)], { type: file.type });
}

// Returns the text with this keyword, undefined if the file is no PNG or has none.
export async function textIn(file, keyword) {
  const bytes = new Uint8Array(await file.slice(0, MAX_SEARCHED).arrayBuffer());
  const view = new DataView(bytes.buffer);
  for (let at = 8; at + 12 <= bytes.length && view.getUint32(0) === 0x89504e47; at += 12 + view.getUint32(at)) {
    const kind = String.fromCharCode(...bytes.subarray(at + 4, at + 8));
    if (kind === "IDAT") return;
    const [name, , , , , ...text] = new TextDecoder().decode(bytes.subarray(at + 8, at + 8 + view.getUint32(at))).split("\0");
    if (kind === TEXT && name === keyword) return text.join("\0");
  }
}

async function deflated(data) {
  const stream = new Blob([data]).stream().pipeThrough(new CompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

function chunk(kind, data) {
  const whole = new Uint8Array(12 + data.length);
  const view = new DataView(whole.buffer);
  view.setUint32(0, data.length);
  whole.set(new TextEncoder().encode(kind), 4);
  whole.set(data, 8);
  view.setUint32(8 + data.length, checksum(whole.subarray(4, 8 + data.length)));
  return whole;
}

const TABLE = Uint32Array.from({ length: 256 }, (_, byte) => {
  let rest = byte;
  for (let bit = 0; bit < 8; bit++) rest = rest & 1 ? 0xedb88320 ^ (rest >>> 1) : rest >>> 1;
  return rest;
});

function checksum(data) {
  let sum = 0xffffffff;
  for (const byte of data) sum = TABLE[(sum ^ byte) & 255] ^ (sum >>> 8);
  return (sum ^ 0xffffffff) >>> 0;
}
