// What moves on a page: the theme, tips, sorted tables, dots with their rows, and the timeline.
"use strict";
(() => {
  const root = document.documentElement, byId = (key) => document.getElementById(key);

  // ---- theme ----------------------------------------------------------------------------------------------
  const themes = ["system", "light", "dark"];
  const kept = () => { try { return localStorage.getItem("stepcast-theme") || "system"; } catch { return "system"; } };
  let theme = kept();
  const applied = [];
  const setTheme = (name) => {
    theme = name;
    if (name === "system") delete root.dataset.theme; else root.dataset.theme = name;
    const button = byId("theme");
    if (button) { button.textContent = { system: "Theme", light: "Light", dark: "Dark" }[name]; button.setAttribute("aria-label", `theme: ${name}`); }
    try { localStorage.setItem("stepcast-theme", name); } catch { /* a page from disk may not keep it */ }
    for (const each of applied) each();
  };
  byId("theme")?.addEventListener("click", () => setTheme(themes[(themes.indexOf(theme) + 1) % themes.length]));
  setTheme(theme);

  // ---- tips -----------------------------------------------------------------------------------------------
  const tip = document.createElement("div");
  tip.id = "tip"; tip.hidden = true; tip.setAttribute("role", "tooltip");
  document.body.append(tip);
  const showTip = (words, x, y) => {
    tip.textContent = words; tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - box.width - 4))}px`;
    tip.style.top = `${y + 18 + box.height > innerHeight ? Math.max(4, y - box.height - 10) : y + 18}px`;
  };
  const hideTip = () => { tip.hidden = true; };
  document.addEventListener("pointermove", (event) => {
    const words = event.target.closest?.("[data-tip]")?.dataset.tip;
    if (words) showTip(words, event.clientX, event.clientY);
    else if (event.target.tagName !== "CANVAS") hideTip();
  });
  document.addEventListener("focusin", (event) => {
    const words = event.target.dataset?.tip;
    if (!words) return;
    const box = event.target.getBoundingClientRect();
    showTip(words, box.right, box.bottom);
  });
  document.addEventListener("focusout", hideTip);
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });

  // ---- copying --------------------------------------------------------------------------------------------
  document.addEventListener("click", (event) => {
    const button = event.target.closest?.("[data-copy]");
    if (!button) return;
    const done = () => { button.textContent = "Copied"; setTimeout(() => { button.textContent = "Copy"; }, 1500); };
    navigator.clipboard?.writeText(button.dataset.copy).then(done, () => {});
  });

  // ---- tables ---------------------------------------------------------------------------------------------
  const keyOf = (row, at) => { const cell = row.cells[at]; return cell.dataset.key ?? cell.textContent; };
  const sortBy = (table, at, down) => {
    const rows = [...table.tBodies[0].rows];
    const numbers = rows.every((row) => keyOf(row, at) === "" || !Number.isNaN(Number(keyOf(row, at))));
    rows.sort((a, b) => {
      const first = keyOf(a, at), second = keyOf(b, at);
      return numbers ? Number(first) - Number(second) : first.localeCompare(second);
    });
    if (down) rows.reverse();
    table.tBodies[0].append(...rows);
    [...table.tHead.rows[0].cells].forEach((cell, index) =>
      cell.setAttribute("aria-sort", index !== at ? "none" : down ? "descending" : "ascending"));
  };
  document.addEventListener("click", (event) => {
    const button = event.target.closest?.("table.sortable .sort");
    if (!button) return;
    const head = button.closest("th");
    sortBy(button.closest("table"), head.cellIndex, head.getAttribute("aria-sort") === "ascending");
  });

  // ---- dots of a chart and rows of a table that are the same ----------------------------------------------
  const light = (number, on) => {
    for (const each of document.querySelectorAll(`[data-row="${CSS.escape(number)}"]`)) each.classList.toggle("on", on);
  };
  for (const [enter, name] of [[true, "pointerover"], [false, "pointerout"], [true, "focusin"], [false, "focusout"]]) {
    document.addEventListener(name, (event) => {
      const number = event.target.closest?.("[data-row]")?.dataset.row;
      if (number !== undefined) light(number, enter);
    });
  }
  document.addEventListener("click", (event) => {
    const number = event.target.closest?.("circle[data-row]")?.dataset.row;
    if (number !== undefined) document.querySelector(`tr[data-row="${CSS.escape(number)}"]`)?.scrollIntoView({ block: "nearest" });
  });

  // ---- the timeline ---------------------------------------------------------------------------------------
  const seconds = (value) => {
    const size = Math.abs(value);
    if (size >= 60) return `${(value / 60).toFixed(2)} min`;
    if (size >= 1) return `${value.toFixed(3)} s`;
    if (size >= 1e-3) return `${(value * 1e3).toFixed(2)} ms`;
    if (size >= 1e-6) return `${(value * 1e6).toFixed(2)} us`;
    return value === 0 ? "0 s" : `${(value * 1e9).toFixed(1)} ns`;
  };
  const unpacked = async (data) => {
    const bytes = Uint8Array.from(atob(data.data), (each) => each.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    const planes = new Uint8Array(await new Response(stream).arrayBuffer());
    const count = data.count, names = ["start", "length", "row", "name", "kind", "detail", "batch"], found = {};
    names.forEach((name, column) => {
      const values = found[name] = new Int32Array(count), from = column * 4 * count;
      for (let at = 0; at < count; at++) {
        values[at] = planes[from + at] | planes[from + count + at] << 8 | planes[from + 2 * count + at] << 16 | planes[from + 3 * count + at] << 24;
      }
    });
    for (let at = 1; at < count; at++) found.start[at] += found.start[at - 1];
    return found;
  };

  // #rrggbb as its parts, and as a pixel of a canvas.
  const parts = (colour) => { const value = parseInt(colour.slice(1), 16); return [value >> 16 & 255, value >> 8 & 255, value & 255]; };
  const packedColour = ([red, green, blue]) => (255 << 24 | blue << 16 | green << 8 | red) >>> 0;

  const begin = async (canvas) => {
    const data = JSON.parse(byId("timeline-data").textContent);
    const slices = await unpacked(data), count = data.count;
    const paint = canvas.getContext("2d");
    const TOP = 26, HEIGHT = 22, THIN = 16, FOLDED = 30, MOST = 620;
    // Where the slices of each row begin; they are sorted by row, then by start.
    const first = new Int32Array(data.rows.length + 1).fill(count);
    for (let at = count - 1; at >= 0; at--) first[slices.row[at]] = at;
    for (let at = data.rows.length - 1; at >= 0; at--) if (first[at] > first[at + 1]) first[at] = first[at + 1];
    const ranks = [];
    data.rows.forEach((row, at) => {
      let rank = ranks[ranks.length - 1];
      if (!rank || rank.rank !== row.rank) ranks.push(rank = { rank: row.rank, stage: row.stage, rows: [], folded: false });
      rank.rows.push(at);
    });
    if (ranks.length > 1 && data.rows.length > 14) for (const rank of ranks) rank.folded = true;
    const ticks = Math.max(1, Math.round(data.span_s / data.tick_s));
    let from = 0, to = ticks, down = 0, width = 0, height = 0, label = 0, wanted = "", hits = null, pick = -1, queued = false, lines = [], style = {}, image = null, pixels = null, strip = null, bright = null, dim = null, card = 0, empty = 0, boxed = null;
    const usedKinds = new Set(slices.kind);
    for (const each of document.querySelectorAll("#kinds [data-kind]")) each.hidden = !usedKinds.has(Number(each.dataset.kind));

    const place = () => {
      lines = [];
      let y = TOP;
      for (const rank of ranks) {
        const title = rank.stage === null || rank.stage === undefined ? `rank ${rank.rank}` : `stage ${rank.stage}`;
        if (rank.folded) { lines.push({ rank, y, height: FOLDED, title, rows: rank.rows, folded: true }); y += FOLDED + 4; continue; }
        rank.rows.forEach((row, at) => {
          const tall = data.rows[row].depth ? THIN : HEIGHT;
          lines.push({ rank, y, height: tall, title: at ? "" : title, rows: [row], name: data.rows[row].depth ? "" : data.rows[row].name });
          y += tall + (at === rank.rows.length - 1 ? 6 : 1);
        });
      }
      return y + 4;
    };
    const resize = () => {
      const all = place(), scale = devicePixelRatio || 1;
      height = Math.min(all, MOST); width = canvas.clientWidth || 800;
      canvas.style.height = `${height}px`;
      canvas.width = Math.round(width * scale); canvas.height = Math.round(height * scale);
      paint.setTransform(scale, 0, 0, scale, 0, 0);
      label = width < 560 ? 74 : 136;
      down = Math.max(0, Math.min(down, all - height));
      const css = getComputedStyle(root);
      for (const name of ["ink", "soft", "line", "grid", "card", "back", "accent", "slice-ink"]) style[name] = css.getPropertyValue(`--${name}`).trim();
      const back = parts(style.back);
      card = packedColour(parts(style.card)); empty = packedColour(back);
      bright = data.kinds.map((kind) => packedColour(parts(css.getPropertyValue(`--${kind}`).trim())));
      dim = data.kinds.map((kind) => packedColour(parts(css.getPropertyValue(`--${kind}`).trim()).map((each, at) => each * .16 + back[at] * .84 | 0)));
      image = paint.createImageData(canvas.width, canvas.height); pixels = new Uint32Array(image.data.buffer); strip = new Uint32Array(canvas.width);
      draw();
    };
    const toX = (tick) => label + (tick - from) / (to - from) * (width - label);
    const toTick = (x) => from + (x - label) / (width - label) * (to - from);
    // The first slice of a row that may reach beyond a tick: slices of one row do not overlap but for nesting.
    const search = (row, tick) => {
      let low = first[row], high = first[row + 1];
      while (low < high) { const middle = low + high >> 1; if (slices.start[middle] + slices.length[middle] < tick) low = middle + 1; else high = middle; }
      return low;
    };
    // The slices of a row into one line of pixels: in each the colour of what takes most of it.
    const fillStrip = (row, texts, y, tall) => {
      const scale = devicePixelRatio || 1, left = label * scale, per = (strip.length - left) / (to - from), end = first[row + 1];
      let last = -1, most = 0;
      for (let at = search(row, from); at < end; at++) {
        const start = slices.start[at];
        if (start > to) break;
        const x0 = Math.max(left, left + (start - from) * per), x1 = Math.min(strip.length, left + (start + slices.length[at] - from) * per);
        const hit = hits === null || hits[at] === 1, begin = x0 | 0, wide = x1 - x0;
        const colour = (hit ? bright : dim)[slices.kind[at]];
        if (x1 <= begin + 1) {
          // Within one pixel: the longest shows, and what was searched for before all others.
          const size = hit && hits !== null ? 2 + wide : wide;
          if (begin !== last || size > most) { strip[begin] = colour; last = begin; most = size; }
          continue;
        }
        strip.fill(colour, begin, Math.ceil(x1) - (wide > 3 * scale ? 1 : 0));
        last = Math.ceil(x1) - 1; most = x1 - last;
        if (texts && hit && wide > 46 * scale) texts.push([data.names[slices.name[at]], x0 / scale, y, wide / scale, tall]);
        if (at === pick) boxed = [x0 / scale, y, wide / scale, tall];
      }
    };
    const drawStrip = (rows, texts, y, tall) => {
      const scale = devicePixelRatio || 1, from = Math.max(Math.round(y * scale), Math.round((TOP - 2) * scale)), below = Math.min(Math.round((y + tall) * scale), canvas.height);
      if (below <= from) return;
      strip.fill(empty);
      for (const row of rows) fillStrip(row, texts, y, tall);
      for (let line = from; line < below; line++) pixels.set(strip, line * strip.length);
    };
    const draw = () => {
      queued = false; boxed = null;
      const texts = [];
      pixels.fill(card);
      for (const line of lines) {
        const y = line.y - down;
        if (y + line.height < TOP || y > height) continue;
        const thin = line.folded && line.rows.length > 1 ? Math.round(line.height * .36) : 0;
        drawStrip(line.rows.slice(0, 1), texts, y, line.height - thin - (thin ? 1 : 0));
        if (thin) drawStrip(line.rows.slice(1), null, y + line.height - thin, thin);
      }
      paint.putImageData(image, 0, 0);
      paint.save(); paint.beginPath(); paint.rect(0, TOP - 2, width, height); paint.clip();
      paint.font = "11px system-ui, sans-serif"; paint.fillStyle = style["slice-ink"];
      for (const [words, x, y, wide, tall] of texts) paint.fillText(words.slice(0, (wide - 8) / 6 | 0), x + 4, y + tall / 2 + 4);
      if (boxed) { paint.strokeStyle = style.ink; paint.lineWidth = 2; paint.strokeRect(boxed[0] + 1, boxed[1] + 1, Math.max(boxed[2] - 2, 2), boxed[3] - 2); }
      paint.fillStyle = style.card; paint.fillRect(0, 0, label, height);
      for (const line of lines) {
        const y = line.y - down;
        if (y + line.height < TOP || y > height) continue;
        paint.fillStyle = line.title ? style.ink : style.soft; paint.font = line.title ? "600 12px system-ui, sans-serif" : "11px system-ui, sans-serif";
        const mark = line.title ? (line.folded ? "\u25b8 " : "\u25be ") : "  ";
        const words = line.title && line.name && !line.folded && label > 80 ? `${line.title} ${line.name}` : line.title || line.name || "";
        paint.fillText(fitted(mark + words, label - 8), 4, y + line.height / 2 + 4);
      }
      paint.font = "11px system-ui, sans-serif";
      paint.restore();
      drawAxis();
    };
    // A tick in the unit of the largest one, with as many digits as tell neighbours apart.
    const inUnit = (value, step, largest) => {
      const [size, unit] = [[60, "min"], [1, "s"], [1e-3, "ms"], [1e-6, "us"]].find(([each]) => largest >= each) || [1e-9, "ns"];
      return `${(value / size).toFixed(Math.max(0, Math.min(9, -Math.floor(Math.log10(step / size) + 1e-9))))} ${unit}`;
    };
    const fitted = (words, room) => {
      let length = words.length;
      while (length > 1 && paint.measureText(words.slice(0, length)).width > room) length--;
      return length < words.length ? `${words.slice(0, length - 1)}\u2026` : words;
    };
    const drawAxis = () => {
      paint.fillStyle = style.card; paint.fillRect(0, 0, width, TOP - 2);
      const shown = (to - from) * data.tick_s, about = Math.max(2, (width - label) / 110), rough = shown / about;
      const power = 10 ** Math.floor(Math.log10(rough)), step = [1, 2, 5, 10].find((each) => each * power >= rough) * power;
      paint.fillStyle = style.soft; paint.strokeStyle = style.line; paint.lineWidth = 1; paint.beginPath();
      const begins = from * data.tick_s;
      for (let at = Math.ceil(begins / step) * step; at <= begins + shown; at += step) {
        const x = toX(at / data.tick_s);
        paint.moveTo(x, TOP - 6); paint.lineTo(x, height);
        const words = inUnit(Math.abs(at) < step / 1e6 ? 0 : at, step, begins + shown), wide = paint.measureText(words).width;
        if (x + 3 + wide <= width) paint.fillText(words, x + 3, TOP - 10);
      }
      paint.globalAlpha = .55; paint.stroke(); paint.globalAlpha = 1;
      // Where in the whole this is.
      paint.fillStyle = style.grid; paint.fillRect(label, TOP - 5, width - label, 2);
      paint.fillStyle = style.accent; paint.fillRect(label + from / ticks * (width - label), TOP - 5, Math.max(3, (to - from) / ticks * (width - label)), 2);
    };
    const redraw = () => { if (!queued) { queued = true; requestAnimationFrame(draw); } };
    const show = (low, high) => {
      const span = Math.max(8, Math.min(high - low, ticks));
      from = Math.max(0, Math.min(low, ticks - span)); to = from + span;
      redraw();
    };
    const zoom = (factor, x) => {
      const tick = toTick(x ?? label + (width - label) / 2);
      show(tick - (tick - from) * factor, tick + (to - tick) * factor);
    };
    const lift = (by) => { const all = lines.length ? lines[lines.length - 1].y + 60 : 0; down = Math.max(0, Math.min(down + by, Math.max(0, all - height))); redraw(); };
    const sliceAt = (x, y) => {
      if (x < label || y < TOP) return -1;
      const line = lines.find((each) => y + down >= each.y && y + down < each.y + each.height);
      if (!line) return -1;
      let rows = line.rows;
      if (line.folded && line.rows.length > 1) rows = y + down - line.y > line.height * .64 ? line.rows.slice(1) : [line.rows[0]];
      const tick = toTick(x), reach = (to - from) / (width - label) * 2;
      let best = -1;
      for (const row of rows) {
        for (let at = search(row, tick - reach); at < first[row + 1] && slices.start[at] <= tick + reach; at++) {
          const inside = slices.start[at] <= tick && tick <= slices.start[at] + slices.length[at];
          if (inside) return at;
          if (best < 0) best = at;
        }
      }
      return best;
    };
    const said = (at) => {
      const row = data.rows[slices.row[at]], parts = [data.names[slices.name[at]], `${seconds(slices.length[at] * data.tick_s)} from ${seconds(slices.start[at] * data.tick_s)}`];
      parts.push(`${row.stage === null || row.stage === undefined ? "" : `stage ${row.stage}, `}rank ${row.rank}, ${row.name}`);
      if (slices.batch[at] >= 0) parts.push(`micro-batch ${slices.batch[at]}`);
      if (slices.detail[at] >= 0 && data.details[slices.detail[at]]) parts.push(data.details[slices.detail[at]]);
      return parts;
    };
    const choose = (at, move) => {
      pick = at;
      if (at >= 0) {
        byId("picked").textContent = said(at).join(" · ");
        const start = slices.start[at], end = start + slices.length[at];
        if (move && (end < from || start > to || slices.length[at] < (to - from) / 400)) {
          const span = Math.max(slices.length[at] * 12, 64); show((start + end) / 2 - span / 2, (start + end) / 2 + span / 2);
        }
        if (move) {
          const line = lines.find((each) => each.rows.includes(slices.row[at]));
          if (line && (line.y - down < TOP || line.y - down + line.height > height)) lift(line.y - down - height / 2);
        }
      }
      redraw();
    };

    // Pointers: one moves, two zoom.
    const pointers = new Map();
    let moved = 0;
    canvas.addEventListener("pointerdown", (event) => { canvas.setPointerCapture(event.pointerId); pointers.set(event.pointerId, event); moved = 0; canvas.classList.add("moving"); hideTip(); });
    const lifted = (event) => { pointers.delete(event.pointerId); if (!pointers.size) canvas.classList.remove("moving"); };
    canvas.addEventListener("pointercancel", lifted);
    canvas.addEventListener("pointerup", (event) => {
      const clicked = pointers.has(event.pointerId) && moved < 4;
      lifted(event);
      if (!clicked) return;
      if (event.offsetX < label) {
        const line = lines.find((each) => event.offsetY + down >= each.y && event.offsetY + down < each.y + each.height);
        if (line) { line.rank.folded = !line.rank.folded; resize(); }
      } else choose(sliceAt(event.offsetX, event.offsetY), false);
    });
    canvas.addEventListener("pointermove", (event) => {
      const before = pointers.get(event.pointerId);
      if (!before) {
        const at = sliceAt(event.offsetX, event.offsetY);
        if (at < 0) hideTip(); else showTip(said(at).join("\n"), event.clientX, event.clientY);
        return;
      }
      if (pointers.size === 2) {
        const other = [...pointers.values()].find((each) => each.pointerId !== event.pointerId);
        const was = Math.abs(before.offsetX - other.offsetX), is = Math.abs(event.offsetX - other.offsetX);
        if (was > 8 && is > 8) zoom(was / is, (event.offsetX + other.offsetX) / 2);
        moved += 10;
      } else {
        const by = (event.offsetX - before.offsetX) / (width - label) * (to - from);
        moved += Math.abs(event.offsetX - before.offsetX) + Math.abs(event.offsetY - before.offsetY);
        show(from - by, to - by);
        if (event.pointerType !== "touch") lift(before.offsetY - event.offsetY);
      }
      pointers.set(event.pointerId, event);
    });
    canvas.addEventListener("pointerleave", hideTip);
    canvas.addEventListener("dblclick", (event) => {
      const at = sliceAt(event.offsetX, event.offsetY);
      if (at >= 0) show(slices.start[at] - slices.length[at] * .2, slices.start[at] + slices.length[at] * 1.2);
    });
    canvas.addEventListener("wheel", (event) => {
      // The page scrolls as ever, unless Ctrl is held or the timeline was chosen.
      if (event.ctrlKey || event.metaKey) { event.preventDefault(); zoom(Math.exp(event.deltaY * .0022), event.offsetX); }
      else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        event.preventDefault(); const by = (event.deltaX || event.deltaY) / (width - label) * (to - from); show(from + by, to + by);
      } else if (document.activeElement === canvas) { event.preventDefault(); zoom(Math.exp(event.deltaY * .0022), event.offsetX); }
    }, { passive: false });
    const step = (by) => {
      if (pick < 0) { const at = search(lines[0].rows[0], from); choose(Math.min(at, count - 1), true); return; }
      const next = pick + by;
      if (next >= 0 && next < count && slices.row[next] === slices.row[pick]) choose(next, true);
    };
    const keys = {
      "+": () => zoom(.6), "=": () => zoom(.6), "-": () => zoom(1 / .6), w: () => zoom(.6), s: () => zoom(1 / .6),
      ArrowLeft: () => show(from - (to - from) * .15, to - (to - from) * .15), a: () => show(from - (to - from) * .15, to - (to - from) * .15),
      ArrowRight: () => show(from + (to - from) * .15, to + (to - from) * .15), d: () => show(from + (to - from) * .15, to + (to - from) * .15),
      ArrowUp: () => lift(-40), ArrowDown: () => lift(40), "0": () => show(0, ticks), Home: () => show(0, to - from), End: () => show(ticks - (to - from), ticks),
      n: () => step(1), p: () => step(-1), "/": () => byId("find").focus(),
      Enter: () => { const rank = pick >= 0 ? ranks.find((each) => each.rows.includes(slices.row[pick])) : ranks[0]; rank.folded = !rank.folded; resize(); },
    };
    canvas.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const act = keys[event.key];
      if (act) { event.preventDefault(); act(); }
    });
    byId("zoom-in").addEventListener("click", () => zoom(.5));
    byId("zoom-out").addEventListener("click", () => zoom(2));
    byId("fit").addEventListener("click", () => { down = 0; show(0, ticks); });
    byId("fold").addEventListener("click", () => { const fold = ranks.some((each) => !each.folded); for (const rank of ranks) rank.folded = fold; resize(); });

    // Search: those that match stay bright; Enter goes to the next.
    const find = byId("find");
    find.addEventListener("input", () => {
      wanted = find.value.trim().toLowerCase();
      if (!wanted) { hits = null; byId("found").textContent = ""; redraw(); return; }
      const named = data.names.map((name) => name.toLowerCase().includes(wanted));
      hits = new Uint8Array(count);
      let number = 0, total = 0;
      for (let at = 0; at < count; at++) if (named[slices.name[at]]) { hits[at] = 1; number++; total += slices.length[at]; }
      byId("found").textContent = number ? `${number.toLocaleString("en")} found, ${seconds(total * data.tick_s)} in all` : "none found";
      redraw();
    });
    find.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { find.value = ""; find.dispatchEvent(new Event("input")); canvas.focus(); }
      if (event.key !== "Enter" || hits === null) return;
      event.preventDefault();
      const by = event.shiftKey ? -1 : 1;
      for (let step = 1; step <= count; step++) {
        const at = (((pick < 0 ? (by > 0 ? -1 : 0) : pick) + by * step) % count + count) % count;
        if (hits[at]) { choose(at, true); return; }
      }
    });
    new ResizeObserver(resize).observe(canvas.parentElement);
    applied.push(resize);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", resize);
    addEventListener("beforeprint", resize);
    resize();
    canvas.dataset.ready = String(count);
    // For measurements and tests.
    canvas.view = () => ({ from, to, ticks, down, pick, folded: ranks.map((each) => each.folded), label, width, height, lines: lines.map(({ y, height: tall }) => [y - down, tall]) });
    canvas.drawNow = draw;
    canvas.showRange = (low, high) => { show(low * ticks, high * ticks); };
  };
  const start = () => {
    const canvas = byId("canvas");
    if (canvas && !canvas.dataset.begun) {
      canvas.dataset.begun = "1";
      begin(canvas).catch((error) => { if (canvas.isConnected) byId("picked").textContent = `The timeline cannot be drawn: ${error.message}`; });
    }
  };
  window.stepcast = { start, showTip, hideTip, seconds };
  start();
})();
