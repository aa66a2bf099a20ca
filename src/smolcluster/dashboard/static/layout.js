// Where the machines stand and how their links run. Pure: the same machines and width, the same picture.
//
//   star     w0 ---|      |--- w1      the server is as high as its workers, so that every link is a line of its own
//            w2 ---|server|--- w3
//
//   wheel    the same, and the ring of the workers around it: down on the left, up on the right
//   ring     along a row and back along the next; with many of them in bends, and back along the first column
//   line     in bends: right, down, left, down, right
//
// No link runs behind a machine, and every link has room for what it carries: above it, or beside it where it goes down.
// More machines than MAX_SHOWN are dots around a circle, without words.

export const MAX_SHOWN = 24;
const CARD = { w: 158, h: 64, least: 94 };
const ACROSS = 78; // of a link that has its rate above it
const DOWN = 30; // of a link that has its rate beside it
const EDGE = 4; // between machines and the frame
const OFF = 3; // between a link and its machines

const heightOf = (rows) => (rows <= 5 ? CARD.h : rows <= 8 ? 46 : 30);

/** `places`: {x, y, w, h} of each rank, from its middle; `bends`: the way of links that are no straight lines. */
export function layout(shape, ranks, server, width) {
  const plan = { places: new Map(), bends: new Map(), width, height: 0, compact: ranks.length > MAX_SHOWN };
  const put = (rank, x, y, size) => plan.places.set(rank, { x, y, ...size });
  if (plan.compact) circle(plan, put, ranks, server);
  else if (shape === "star") star(plan, put, ranks, server);
  else if (shape === "wheel") wheel(plan, put, ranks, server);
  else if (shape === "line") line(plan, put, ranks);
  else if (ranks.length < 2) {
    ranks.forEach((rank) => put(rank, width / 2, 70, { w: CARD.w, h: CARD.h }));
    plan.height = 140;
  } else ring(plan, put, ranks);
  return plan;
}

function circle(plan, put, ranks, server) {
  const { width } = plan;
  const height = (plan.height = width < 600 ? 320 : 380);
  const across = Math.max(6, Math.min(34, (0.92 * Math.PI * (width + height)) / 2 / ranks.length - 4));
  const size = { w: across, h: across, round: true };
  const [rx, ry] = [width / 2 - across / 2 - 4, height / 2 - across / 2 - 4];
  ranks.forEach((rank, i) => {
    const angle = -Math.PI / 2 + (2 * Math.PI * i) / ranks.length;
    put(rank, width / 2 + rx * Math.cos(angle), height / 2 + ry * Math.sin(angle), size);
  });
  if (server !== null) put(server, width / 2, height / 2, { w: 120, h: CARD.h });
}

/** Three columns, workers left and right of their server; two where there is no room for three, or no worker for the third. */
function columns(width, num, { right = 0 } = {}) {
  const two = num > 1 && width >= 3 * CARD.least + 2 * ACROSS + 2 * EDGE;
  if (two) {
    const w = Math.min(CARD.w, (width - 2 * ACROSS - 2 * EDGE) / 3);
    return { two, w, server: { x: width / 2, w }, left: EDGE + w / 2, right: width - EDGE - w / 2 };
  }
  const room = width - 2 * EDGE - ACROSS - right;
  const [own, w] = [Math.min(CARD.w, 0.43 * room), Math.min(CARD.w, 0.57 * room)];
  const gap = Math.min(150, width - 2 * EDGE - right - own - w);
  const from = (width - own - gap - w - right) / 2;
  return { two, w, server: { x: from + own / 2, w: own }, right: from + own + gap + w / 2 };
}

function star(plan, put, ranks, server) {
  const { two, w, left, right, server: middle } = columns(plan.width, ranks.length);
  const rows = two ? Math.ceil(ranks.length / 2) : Math.max(1, ranks.length);
  const h = heightOf(rows);
  const step = h + 14;
  plan.height = Math.max(two ? 150 : 110, rows * step + 6);
  ranks.forEach((rank, i) => {
    const row = two ? i >> 1 : i;
    const inColumn = two && i % 2 ? ranks.length - rows : rows;
    put(rank, two && i % 2 === 0 ? left : right, plan.height / 2 + (row - (inColumn - 1) / 2) * step, { w, h });
  });
  put(server, middle.x, plan.height / 2, { w: middle.w, h: Math.max(CARD.h, rows * step - 14), ports: true });
}

function wheel(plan, put, ranks, server) {
  const margin = 30; // for the link that closes the ring
  const { two, w, left, right, server: middle } = columns(plan.width, ranks.length, { right: margin });
  const down = two ? Math.ceil(ranks.length / 2) : ranks.length; // so many go down, the others up again
  const h = heightOf(down);
  const step = h + DOWN;
  const [top, high] = [two ? margin + 4 : 2 * EDGE, (down - 1) * step];
  plan.height = top + high + h + (two ? margin : EDGE);
  const spread = (i, num) => top + h / 2 + (num > 1 ? (high * i) / (num - 1) : high / 2);
  ranks.forEach((rank, i) => {
    if (!two || i < down) put(rank, two ? left : right, spread(i, down), { w, h });
    else put(rank, right, spread(ranks.length - 1 - i, ranks.length - down), { w, h });
  });
  put(server, middle.x, top + h / 2 + high / 2, { w: middle.w, h: high + h, ports: true });
  if (ranks.length < 2) return;
  const at = (i) => plan.places.get(ranks[i]);
  const bend = (from, to, points, label) => plan.bends.set(`${ranks[from]}>${ranks[to]}`, { points, label });
  const last = ranks.length - 1;
  if (!two) {
    const x = right + w / 2 + 14;
    const [a, b] = [at(last), at(0)];
    const points = [[a.x + w / 2 + OFF, a.y], [x, a.y], [x, b.y], [b.x + w / 2 + OFF, b.y]];
    return bend(last, 0, points, { x: x + 9, y: (a.y + b.y) / 2, turned: true });
  }
  for (const [from, to, y] of [[down - 1, down, plan.height - 8], [last, 0, 18]]) {
    const [a, b] = [at(from), at(to)];
    const side = Math.sign(y - a.y);
    const points = [[a.x, a.y + side * (h / 2 + OFF)], [a.x, y], [b.x, y], [b.x, b.y + side * (h / 2 + OFF)]];
    bend(from, to, points, { x: (a.x + b.x) / 2, y: y - 10 });
  }
}

/** Cells of a grid in so many columns, each with room for a link to the next. */
function grid(width, num) {
  const most = Math.max(2, Math.floor((width - 2 * EDGE + ACROSS) / (CARD.least + ACROSS)));
  return Math.max(1, Math.min(num, most));
}

function fill(plan, put, cells, ranks, across, down = DOWN) {
  const { width } = plan;
  const rows = 1 + Math.max(...cells.map(([row]) => row));
  const h = heightOf(rows);
  const w = Math.min(CARD.w, (width - 2 * EDGE - (across - 1) * ACROSS) / across);
  // Not farther from each other than that looks good.
  const gap = across > 1 ? Math.min(180, (width - 2 * EDGE - across * w) / (across - 1)) : 0;
  const from = (width - across * w - (across - 1) * gap) / 2 + w / 2;
  plan.height = rows * (h + down) + (rows === 1 ? 36 : -down + 12);
  const top = rows === 1 ? plan.height / 2 : 6 + h / 2;
  ranks.forEach((rank, i) => put(rank, from + cells[i][1] * (w + gap), top + cells[i][0] * (h + down), { w, h }));
}

function line(plan, put, ranks) {
  const across = grid(plan.width, ranks.length);
  const cells = ranks.map((_, i) => {
    const [row, column] = [Math.floor(i / across), i % across];
    return [row, row % 2 ? across - 1 - column : column];
  });
  fill(plan, put, cells, ranks, across);
}

function ring(plan, put, ranks) {
  const num = ranks.length;
  const most = grid(plan.width, num);
  if (num === 2) return fill(plan, put, [[0, 0], [0, 1]], ranks, 2);
  if (num <= 2 * most) {
    const upper = Math.ceil(num / 2);
    const lower = num - upper;
    // The lower row has as many, or one less: then its ends are under those of the upper one, or its one in the middle.
    const column = (i) => (i < upper ? i : lower > 1 ? ((num - 1 - i) * (upper - 1)) / (lower - 1) : (upper - 1) / 2);
    const slanted = num % 2 && lower === 1; // their rates stand on them: longer, so that more of them is to be seen
    return fill(plan, put, ranks.map((_, i) => [i < upper ? 0 : 1, column(i)]), ranks, upper, slanted ? 2 * DOWN : DOWN);
  }
  let best = null;
  for (let across = most; across >= 2; across--) {
    const cells = cycle(num, across);
    if (cells && (!best || cells.rows < best.cells.rows)) best = { cells, across };
  }
  fill(plan, put, best.cells, ranks, best.across);
}

/** A way around through a grid: in bends down through all columns but the first, and up through that. Cells that are too many
 * are left out where the way only passes straight through them. */
function cycle(num, across) {
  let rows = Math.ceil(num / across);
  if (across > 2) rows += rows % 2;
  const cells = [[0, 0]];
  for (let row = 0; row < rows; row++) {
    for (let i = 1; i < across; i++) cells.push([row, row % 2 ? across - i : i]);
  }
  for (let row = rows - 1; row > 0; row--) cells.push([row, 0]);
  const straight = ([row, column]) => {
    if (column === 0) return row > 0 && row < rows - 1;
    return column < across - 1 && (row === 0 || row === rows - 1 || column > 1);
  };
  for (let i = cells.length - 1; i > 0 && cells.length > num; i--) if (straight(cells[i])) cells.splice(i, 1);
  return cells.length === num ? Object.assign(cells, { rows }) : null;
}

/** Where the line from a to b leaves a. */
function edge(a, b) {
  const [dx, dy] = [b.x - a.x, b.y - a.y];
  const length = Math.hypot(dx, dy) || 1;
  if (a.round) return [a.x + (dx / length) * (a.w / 2 + OFF), a.y + (dy / length) * (a.w / 2 + OFF)];
  const scale = Math.min(dx ? (a.w / 2 + OFF) / Math.abs(dx) : Infinity, dy ? (a.h / 2 + OFF) / Math.abs(dy) : Infinity);
  return [a.x + dx * scale, a.y + dy * scale];
}

/** The way of a link: points from `source` to `target`, and where its rate stands. `alone`: nothing else goes this way. */
export function way(plan, source, target) {
  const bend = plan.bends.get(`${source}>${target}`);
  if (bend) return { ...bend, alone: true };
  const [a, b] = [plan.places.get(source), plan.places.get(target)];
  if (!a || !b) return null;
  // A server with ports: straight across, at the height of the other.
  const [from, to] = [a.ports ? { ...a, y: b.y, h: 0 } : a, b.ports ? { ...b, y: a.y, h: 0 } : b];
  const points = [edge(from, to), edge(to, from)];
  const [[x0, y0], [x1, y1]] = points;
  const [x, y] = [(x0 + x1) / 2, (y0 + y1) / 2];
  if (Math.abs(y1 - y0) < 2) return { points, label: { x, y: y - 15 } };
  if (Math.abs(x1 - x0) < 2) {
    const left = x > plan.width / 2; // on the side that has more room
    return { points, label: { x: left ? x - 12 : x + 12, y, anchor: left ? "end" : "start" } };
  }
  return { points, label: { x, y, boxed: true } };
}

/** The links, those that go the same way together, as they are labelled. */
export function together(plan, links) {
  const pairs = new Map();
  for (const link of links) {
    const own = `${link.source}>${link.target}`;
    const key = plan.bends.has(own) ? own : `${Math.min(link.source, link.target)},${Math.max(link.source, link.target)}`;
    if (!pairs.has(key)) pairs.set(key, []);
    pairs.get(key).push(link);
  }
  return [...pairs.values()];
}
