// The app: a change of a form is answered at once; each view shows its own answer.
"use strict";
(() => {
  const byId = (key) => document.getElementById(key), answer = byId("answer");
  const KEPT = "stepcast-saved";
  const HINTS = { predict: "Fill in the form: the answer appears here.", plan: "Fill in the form: the answer appears here.", alternatives: "Choose a second cluster or framework: the table appears here.", search: "Press Search: results appear here.", analyze: "Drop files: the analysis appears here.", saved: "Choose two saved predictions to compare them here." };
  const answers = {}; // what each view showed last: { found, took, key }, or { words } while it works
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
      const usual = [...(field.options ?? [])].find((option) => option.defaultSelected)?.value, wanted = query.get(field.name) ?? usual ?? field.dataset.plain ?? "";
      field.value = wanted;
      // A value that the list lacks stays, so that the answer says that it is not known.
      if (field.tagName === "SELECT" && field.selectedIndex < 0) { field.add(new Option(wanted, wanted)); field.value = wanted; }
      slide(field);
    }
  };
  const slide = (field) => {
    const slider = document.querySelector(`[data-for="${field.id}"]`);
    if (slider && Number(field.value) >= 1) slider.value = String(Math.round(Math.log2(Number(field.value))));
  };

  // ---- what is answered -----------------------------------------------------------------------------------
  const problem = (words) => { byId("problem").textContent = words; byId("problem").hidden = !words; };
  // Each view shows its own answer, what it is working on, or a hint; never the answer of another view.
  const render = () => {
    byId("short").hidden = true;
    const { found, took, key, words } = answers[view] ?? {};
    answer.setAttribute("aria-busy", String(Boolean(words)));
    byId("origin").hidden = !found;
    for (const name of ["open-page", "keep"]) byId(name).hidden = view !== "predict" || !found;
    delete answer.dataset.answered; delete answer.dataset.whole;
    if (!found) {
      const line = document.createElement("p");
      line.className = "lead"; line.setAttribute("role", "status"); line.textContent = words || HINTS[view];
      answer.replaceChildren(line);
      return;
    }
    answer.innerHTML = found.html; // made by the server of this page, which escapes every text in it
    byId("line").replaceChildren(...(found.command || "").split(/( (?=--)|\n)/).map((words, index) => {
      if (index % 2) return words;
      const option = document.createElement("span"); // with its value on one line
      option.className = "option"; option.textContent = words;
      return option;
    }));
    byId("took").textContent = took ? `answered in ${took} ms` : "";
    answer.dataset.answered = key;
    window.stepcast.start();
    byId("short").textContent = found.summary?.title || ""; byId("short").hidden = !found.summary?.title;
  };
  const put = (name, found, took, key) => { answers[name] = { found, took, key }; if (name === view) { problem(""); render(); } };
  const working = (name, words) => { answers[name] = { words }; if (name === view) { problem(""); render(); } };
  const failed = (name, words) => { delete answers[name]; if (name === view) { render(); problem(words); } };
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
    byId("open-page").href = `page?${query}`;
    answer.setAttribute("aria-busy", "true");
    try {
      const [found, took] = await ask(`answer?${query}`, { signal: mine.signal });
      if (mine.signal.aborted) return;
      last = { query, ...found };
      put("predict", found, took, query);
      staying = setTimeout(async () => {
        try {
          const [whole] = await ask(`whole?${query}`, { signal: mine.signal });
          if (!mine.signal.aborted) { put("predict", whole, took, query); if (view === "predict") answer.dataset.whole = query; }
        } catch { /* the answer that is there stays */ }
      }, 700);
    } catch (error) {
      if (error.name !== "AbortError") failed("predict", error.message);
    } finally {
      if (asking === mine && view === "predict") answer.setAttribute("aria-busy", "false");
    }
  };

  // Plans and comparisons are answered at each change too, and a newer question ends an older one.
  let waiting = 0;
  const plan = (verb) => {
    instead(); clearTimeout(waiting);
    const mine = asking = new AbortController(), query = said(verb).toString();
    history.replaceState(null, "", `#${verb}?${query}`);
    if (verb === "alternatives" && !/_[23]=/.test(query)) { failed(verb, ""); return; } // the hint says what is missing
    answer.setAttribute("aria-busy", "true");
    waiting = setTimeout(async () => {
      try {
        const [found, took] = await ask(`${verb}?${query}`, { signal: mine.signal });
        if (!mine.signal.aborted) put(verb, found, took, query);
      } catch (error) {
        if (error.name !== "AbortError") failed(verb, error.message);
      } finally {
        if (asking === mine && view === verb) answer.setAttribute("aria-busy", "false");
      }
    }, 200);
  };
  const live = { predict, plan: () => plan("plan"), alternatives: () => plan("alternatives") };
  for (const verb of Object.keys(live)) {
    byId(`form-${verb}`).addEventListener("input", (event) => {
      const target = event.target;
      if (target.dataset.for) { byId(target.dataset.for).value = String(2 ** Number(target.value)); } else slide(target);
      live[verb]();
    });
  }
  byId("short").addEventListener("click", () => answer.scrollIntoView({ block: "start" }));
  byId("form-search").addEventListener("input", (event) => {
    const target = event.target;
    if (target.dataset.for) byId(target.dataset.for).value = String(2 ** Number(target.value)); else slide(target);
    history.replaceState(null, "", `#search?${said("search")}`);
  });
  for (const verb of [...Object.keys(live), "search"]) byId(`form-${verb}`).addEventListener("submit", (event) => event.preventDefault());

  // ---- searching ------------------------------------------------------------------------------------------
  const searching = (on) => {
    byId("search-go").disabled = on; byId("search-stop").disabled = !on; byId("search-bar").hidden = !on;
    if (!on) { source?.close(); source = null; }
  };
  byId("search-go").addEventListener("click", () => {
    const query = said("search").toString();
    history.replaceState(null, "", `#search?${query}`);
    instead(); searching(true);
    byId("search-status").textContent = "bounding the candidates";
    working("search", "Searching: bounding the candidates");
    source = new EventSource(`search?${query}`);
    source.addEventListener("progress", (event) => {
      const progress = JSON.parse(event.data);
      byId("search-status").textContent = progress.words;
      working("search", `Searching: ${progress.words}`);
    });
    source.addEventListener("done", (event) => { put("search", JSON.parse(event.data), 0, query); byId("search-status").textContent = "done"; searching(false); });
    source.addEventListener("failed", (event) => { failed("search", JSON.parse(event.data).error); byId("search-status").textContent = ""; searching(false); });
    source.onerror = () => { if (source) { failed("search", "the search ended without an answer: is the app still running?"); byId("search-status").textContent = ""; searching(false); } };
  });
  byId("search-stop").addEventListener("click", () => { searching(false); byId("search-status").textContent = "stopped"; delete answers.search; if (view === "search") render(); });

  // ---- files ----------------------------------------------------------------------------------------------
  const analyze = async (files) => {
    if (!files.length) return;
    instead();
    const listed = [...files].map(({ name, size }) => ({ name: name.replace(/[^\x20-\x7e]/g, "_"), size }));
    const reading = `reading ${files.length} file${files.length > 1 ? "s" : ""}`;
    byId("analyze-status").textContent = reading;
    working("analyze", `Analyzing: ${reading}`);
    const mine = asking = new AbortController();
    byId("analyze-stop").disabled = false;
    try {
      const query = said("predict");
      if (byId("analyze-cluster").value) query.set("ran_on", byId("analyze-cluster").value);
      const [found, took] = await ask(`analyze?${query}`, { signal: mine.signal, method: "POST", body: new Blob([...files]), headers: { "x-files": JSON.stringify(listed) } });
      put("analyze", found, took, "analyze");
      byId("analyze-status").textContent = listed.map(({ name }) => name).join(", ");
    } catch (error) { failed("analyze", mine.signal.aborted ? "" : error.message); byId("analyze-status").textContent = mine.signal.aborted ? "stopped" : ""; }
    byId("analyze-stop").disabled = true;
  };
  byId("analyze-stop").addEventListener("click", () => asking?.abort());
  const drop = byId("drop");
  for (const name of ["dragenter", "dragover"]) drop.addEventListener(name, (event) => { event.preventDefault(); drop.classList.add("over"); });
  for (const name of ["dragleave", "drop"]) drop.addEventListener(name, (event) => { event.preventDefault(); drop.classList.remove("over"); });
  drop.addEventListener("drop", (event) => analyze(event.dataTransfer.files));
  byId("files").addEventListener("change", (event) => analyze(event.target.files));

  // ---- saved ----------------------------------------------------------------------------------------------
  const saved = () => { try { return JSON.parse(localStorage.getItem(KEPT)) ?? []; } catch { return []; } };
  const save = (listed) => { try { localStorage.setItem(KEPT, JSON.stringify(listed.slice(0, 50))); } catch { problem("this browser does not allow saving"); } };
  byId("keep").addEventListener("click", () => {
    if (!last) return;
    save([{ query: last.query, command: last.command, summary: last.summary }, ...saved().filter((each) => each.query !== last.query)]);
    byId("keep").textContent = "Saved"; setTimeout(() => { byId("keep").textContent = "Save"; }, 1500);
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
    working("saved", "Comparing the two predictions");
    try { const [found, took] = await ask(`compare?${query}`); put("saved", found, took, "compare"); }
    catch (error) { failed("saved", error.message); }
  };

  // ---- views and links ------------------------------------------------------------------------------------
  const show = (name) => {
    view = name;
    for (const tab of document.querySelectorAll(".tab")) tab.setAttribute("aria-pressed", String(tab.dataset.view === name));
    for (const panel of document.querySelectorAll(".panel")) panel.hidden = panel.id !== `panel-${name}`;
    if (name === "saved") list();
    problem(""); render();
  };
  for (const tab of document.querySelectorAll(".tab")) {
    tab.addEventListener("click", () => { show(tab.dataset.view); if (live[view]) live[view](); else history.replaceState(null, "", `#${view}`); });
  }
  const copied = (button, words) => {
    const before = button.textContent;
    navigator.clipboard?.writeText(words).then(() => { button.textContent = "Copied"; setTimeout(() => { button.textContent = before; }, 1500); }, () => {});
  };
  byId("copy-line").addEventListener("click", () => copied(byId("copy-line"), byId("line").textContent));
  byId("copy-link").addEventListener("click", () => copied(byId("copy-link"), location.href));
  const go = () => {
    const [name, query = ""] = location.hash.slice(1).split("?");
    const known = ["predict", "search", "plan", "alternatives", "analyze", "saved"].includes(name) ? name : "predict", asked = new URLSearchParams(query);
    show(known);
    if ((live[known] || known === "search") && asked.size) setForm(known, asked);
    if (live[known]) live[known]();
    if (known === "saved" && asked.has("first")) compare(asked);
  };
  addEventListener("hashchange", go);
  go();
})();
