// The app: what a form says is asked at once, and the answer put in its place.
"use strict";
(() => {
  const byId = (key) => document.getElementById(key), answer = byId("answer");
  const KEPT = "stepcast-saved";
  let view = "predict", asking = null, staying = 0, last = null, source = null;

  // ---- what is asked --------------------------------------------------------------------------------------
  const said = (verb) => {
    const found = new URLSearchParams();
    for (const field of byId(`form-${verb}`).elements) if (field.name && field.value !== "") found.set(field.name, field.value);
    return found;
  };
  const setForm = (verb, query) => {
    for (const field of byId(`form-${verb}`).elements) {
      if (!field.name) continue;
      field.value = query.get(field.name) ?? field.dataset.plain ?? "";
      if (field.tagName === "SELECT" && field.selectedIndex < 0) field.selectedIndex = 0;
      slide(field);
    }
  };
  const slide = (field) => {
    const slider = document.querySelector(`[data-for="${field.id}"]`);
    if (slider && Number(field.value) >= 1) slider.value = String(Math.round(Math.log2(Number(field.value))));
  };

  // ---- what is answered -----------------------------------------------------------------------------------
  const problem = (words) => { byId("problem").textContent = words; byId("problem").hidden = !words; };
  const put = (found, took) => {
    problem("");
    answer.innerHTML = found.html; // made by the server of this page, which escapes every text in it
    byId("told").hidden = false;
    byId("line").textContent = found.command || "";
    byId("took").textContent = took ? `answered in ${took} ms` : "";
    window.stepcast.start();
  };
  const ask = async (path, options = {}) => {
    const began = performance.now();
    const response = await fetch(path, options);
    const found = await response.json().catch(() => ({ error: "the answer cannot be read" }));
    if (!response.ok) throw new Error(found.error || response.statusText);
    return [found, Math.round(performance.now() - began)];
  };
  // The page of a live answer comes a moment after it, and must not take the place of what was asked since.
  const instead = () => { clearTimeout(staying); asking?.abort(); };
  const predict = async () => {
    instead();
    const mine = asking = new AbortController(), query = said("predict").toString();
    history.replaceState(null, "", `#predict?${query}`);
    byId("open-page").href = `page?${query}`; byId("open-page").hidden = false; byId("keep").hidden = false;
    answer.setAttribute("aria-busy", "true");
    try {
      const [found, took] = await ask(`answer?${query}`, { signal: mine.signal });
      if (mine.signal.aborted) return;
      last = { query, ...found };
      put(found, took);
      answer.dataset.answered = query;
      staying = setTimeout(async () => {
        try {
          const [whole] = await ask(`whole?${query}`, { signal: mine.signal });
          if (!mine.signal.aborted) { put(whole, took); answer.dataset.whole = query; }
        } catch { /* the answer that is there stays */ }
      }, 700);
    } catch (error) {
      if (error.name !== "AbortError") { problem(error.message); answer.replaceChildren(); byId("line").textContent = ""; }
    } finally {
      if (asking === mine) answer.setAttribute("aria-busy", "false");
    }
  };

  byId("form-predict").addEventListener("input", (event) => {
    const target = event.target;
    if (target.dataset.for) { byId(target.dataset.for).value = String(2 ** Number(target.value)); } else slide(target);
    predict();
  });
  byId("form-search").addEventListener("input", (event) => {
    const target = event.target;
    if (target.dataset.for) byId(target.dataset.for).value = String(2 ** Number(target.value)); else slide(target);
    history.replaceState(null, "", `#search?${said("search")}`);
  });
  for (const verb of ["predict", "search"]) byId(`form-${verb}`).addEventListener("submit", (event) => event.preventDefault());

  // ---- searching ------------------------------------------------------------------------------------------
  const searching = (on) => {
    byId("search-go").disabled = on; byId("search-stop").disabled = !on; byId("search-bar").hidden = !on;
    if (!on) { source?.close(); source = null; }
  };
  byId("search-go").addEventListener("click", () => {
    const query = said("search").toString();
    history.replaceState(null, "", `#search?${query}`);
    problem(""); instead(); searching(true);
    byId("search-told").textContent = "bounding the candidates";
    byId("open-page").hidden = true; byId("keep").hidden = true;
    source = new EventSource(`search?${query}`);
    source.addEventListener("progress", (event) => {
      const told = JSON.parse(event.data);
      byId("search-told").textContent = told.words;
    });
    source.addEventListener("done", (event) => { put(JSON.parse(event.data), 0); byId("search-told").textContent = "done"; answer.dataset.answered = query; searching(false); });
    source.addEventListener("failed", (event) => { problem(JSON.parse(event.data).error); byId("search-told").textContent = ""; searching(false); });
    source.onerror = () => { if (source) { problem("the search ended without an answer: look at its fields"); searching(false); } };
  });
  byId("search-stop").addEventListener("click", () => { searching(false); byId("search-told").textContent = "stopped"; });

  // ---- files ----------------------------------------------------------------------------------------------
  const analyze = async (files) => {
    if (!files.length) return;
    instead();
    const told = [...files].map(({ name, size }) => ({ name: name.replace(/[^\x20-\x7e]/g, "_"), size }));
    byId("analyze-told").textContent = `reading ${files.length} file${files.length > 1 ? "s" : ""}`;
    byId("open-page").hidden = true; byId("keep").hidden = true;
    try {
      const query = new URLSearchParams();
      if (byId("analyze-cluster").value) query.set("cluster", byId("analyze-cluster").value);
      const [found, took] = await ask(`analyze?${query}`, { method: "POST", body: new Blob([...files]), headers: { "x-files": JSON.stringify(told) } });
      put(found, took);
      byId("analyze-told").textContent = told.map(({ name }) => name).join(", ");
      answer.dataset.answered = "analyze";
    } catch (error) { problem(error.message); byId("analyze-told").textContent = ""; }
  };
  const drop = byId("drop");
  for (const name of ["dragenter", "dragover"]) drop.addEventListener(name, (event) => { event.preventDefault(); drop.classList.add("over"); });
  for (const name of ["dragleave", "drop"]) drop.addEventListener(name, (event) => { event.preventDefault(); drop.classList.remove("over"); });
  drop.addEventListener("drop", (event) => analyze(event.dataTransfer.files));
  byId("files").addEventListener("change", (event) => analyze(event.target.files));

  // ---- saved ----------------------------------------------------------------------------------------------
  const saved = () => { try { return JSON.parse(localStorage.getItem(KEPT)) ?? []; } catch { return []; } };
  const save = (listed) => { try { localStorage.setItem(KEPT, JSON.stringify(listed.slice(0, 50))); } catch { problem("this browser keeps nothing"); } };
  byId("keep").addEventListener("click", () => {
    if (!last) return;
    save([{ query: last.query, command: last.command, summary: last.summary }, ...saved().filter((each) => each.query !== last.query)]);
    byId("keep").textContent = "Kept"; setTimeout(() => { byId("keep").textContent = "Keep"; }, 1500);
  });
  const list = () => {
    byId("saved-list").replaceChildren(...saved().map((each, at) => {
      const item = document.createElement("li"), box = document.createElement("input"), words = document.createElement("div"), strong = document.createElement("strong"), rest = document.createElement("span"), gone = document.createElement("button");
      box.type = "checkbox"; box.value = String(at); box.setAttribute("aria-label", `choose ${each.summary.title}`);
      strong.textContent = each.summary.title; rest.textContent = each.summary.words; words.append(strong, rest);
      gone.type = "button"; gone.className = "quiet"; gone.textContent = "Remove"; gone.addEventListener("click", () => { save(saved().filter((other) => other.query !== each.query)); list(); });
      item.append(box, words, gone);
      return item;
    }));
    byId("compare").disabled = true;
  };
  const chosen = () => [...byId("saved-list").querySelectorAll("input:checked")].map((each) => saved()[Number(each.value)]);
  byId("saved-list").addEventListener("change", () => { byId("compare").disabled = chosen().length !== 2; });
  byId("compare").addEventListener("click", async () => {
    const [first, second] = chosen();
    const query = new URLSearchParams({ first: first.query, second: second.query });
    history.replaceState(null, "", `#saved?${query}`);
    await compare(query);
  });
  const compare = async (query) => {
    instead();
    try { const [found, took] = await ask(`compare?${query}`); byId("open-page").hidden = true; byId("keep").hidden = true; put(found, took); answer.dataset.answered = "compare"; }
    catch (error) { problem(error.message); }
  };

  // ---- views and links ------------------------------------------------------------------------------------
  const show = (name) => {
    view = name;
    for (const tab of document.querySelectorAll(".tab")) tab.setAttribute("aria-pressed", String(tab.dataset.view === name));
    for (const panel of document.querySelectorAll(".panel")) panel.hidden = panel.id !== `panel-${name}`;
    if (name === "saved") list();
  };
  for (const tab of document.querySelectorAll(".tab")) {
    tab.addEventListener("click", () => { show(tab.dataset.view); if (view === "predict") predict(); else history.replaceState(null, "", `#${view}`); });
  }
  const copied = (button, words) => {
    const before = button.textContent;
    navigator.clipboard?.writeText(words).then(() => { button.textContent = "Copied"; setTimeout(() => { button.textContent = before; }, 1500); }, () => {});
  };
  byId("copy-line").addEventListener("click", () => copied(byId("copy-line"), byId("line").textContent));
  byId("copy-link").addEventListener("click", () => copied(byId("copy-link"), location.href));
  const go = () => {
    const [name, query = ""] = location.hash.slice(1).split("?");
    const known = ["predict", "search", "analyze", "saved"].includes(name) ? name : "predict", asked = new URLSearchParams(query);
    show(known);
    if ((known === "predict" || known === "search") && asked.size) setForm(known, asked);
    if (known === "predict") predict();
    if (known === "saved" && asked.has("first")) compare(asked);
  };
  addEventListener("hashchange", go);
  go();
})();
