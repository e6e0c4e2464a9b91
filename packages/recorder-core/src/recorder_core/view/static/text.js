// Tokens as text: one UTF-8 decoder over the bytes of all tokens, as a character may be in several.

const decoder = new TextDecoder("utf-8", { ignoreBOM: true });

// Bytes at the end that begin a character which is not whole yet.
function unfinished(bytes) {
  for (let back = 1; back <= Math.min(3, bytes.length); back += 1) {
    const byte = bytes[bytes.length - back];
    if ((byte & 0xc0) === 0x80) continue;
    const needed = byte >= 0xf0 ? 4 : byte >= 0xe0 ? 3 : byte >= 0xc2 ? 2 : 1;
    return needed > back ? back : 0;
  }
  return 0;
}

// The text of each token: a character that several share stands in the last of them.
export function textsOf(ids, pieces) {
  const whole = new Map();
  const texts = new Array(ids.length);
  let tail = new Uint8Array(0);
  for (let at = 0; at < ids.length; at += 1) {
    const id = ids[at];
    if (!tail.length) {
      const known = whole.get(id);
      if (known !== undefined) {
        texts[at] = known;
        continue;
      }
    }
    const piece = pieces.get(id) ?? new Uint8Array(0);
    let bytes = piece;
    if (tail.length) {
      bytes = new Uint8Array(tail.length + piece.length);
      bytes.set(tail);
      bytes.set(piece, tail.length);
    }
    const left = unfinished(bytes);
    const text = decoder.decode(bytes.subarray(0, bytes.length - left));
    if (!tail.length && !left) whole.set(id, text);
    tail = bytes.slice(bytes.length - left);
    texts[at] = text;
  }
  if (tail.length && ids.length) texts[ids.length - 1] += decoder.decode(tail);
  return texts;
}

export const hex = (bytes) => [...bytes].map((byte) => byte.toString(16).toUpperCase().padStart(2, "0")).join(" ");

// What does not show by itself, or changes how what follows is shown.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|[\u{e0000}-\u{e007f}]/gu;
const NAMES = { "\u0000": "NUL", "\u0007": "BEL", "\b": "BS", "\r": "CR", "\u001b": "ESC", "\u007f": "DEL", "\ufeff": "BOM" };

// A text in pieces: an array of [text, tag], tagged where it holds what does not show by itself.
export function marked(text) {
  const parts = [];
  let before = 0;
  for (const found of text.matchAll(HIDDEN)) {
    if (found.index > before) parts.push([text.slice(before, found.index), null]);
    parts.push([found[0], hidden(found[0])]);
    before = found.index + found[0].length;
  }
  if (before < text.length) parts.push([text.slice(before), null]);
  return parts;
}

export function hidden(text) {
  const found = text.match(HIDDEN);
  if (!found) return null;
  return found.map((each) => NAMES[each]
    ?? `U+${each.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`).join(" ");
}
