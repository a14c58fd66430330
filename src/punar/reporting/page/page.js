"use strict";
(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const roots = () => Bokeh.documents.flatMap((document) => document.roots());
  const named = (name) => Bokeh.documents.map((document) => document.get_model_by_name(name)).find((model) => model);

  // The drawings follow the page from light to dark.
  function paint() {
    const css = getComputedStyle(document.documentElement);
    const [ink, paper, line] = ["--ink", "--paper", "--line"].map((name) => css.getPropertyValue(name).trim());
    for (const root of roots()) {
      root.setv({ background_fill_color: paper, border_fill_color: paper, outline_line_color: line });
      for (const axis of [...root.below, ...root.left]) {
        axis.setv({ axis_label_text_color: ink, major_label_text_color: ink, axis_line_color: line, major_tick_line_color: line, minor_tick_line_color: null });
      }
      for (const grid of root.center.filter((part) => "grid_line_color" in part)) grid.setv({ grid_line_color: line });
      for (const label of root.renderers.filter((part) => part.name === "themed")) label.glyph.setv({ text_color: { value: ink } });
      for (const span of root.center.filter((part) => part.dimension === "height" && "location" in part)) span.setv({ line_color: ink });
    }
  }

  // What hovering tells, for the keyboard: a slider over the moments of a drawing.
  function bind(part) {
    const name = part.dataset.drawing;
    const [slider, output] = [part.querySelector("input"), part.querySelector("output")];
    const [glyph, cursor] = [named(name), named(`${name}-cursor`)];
    const root = roots().find((found) => found.renderers.includes(glyph));
    const data = glyph.data_source.data;
    const titles = glyph_titles(root);
    const end = root.x_range.end;
    const tell = () => {
      const at = Number(slider.value);
      cursor.setv({ location: data.left[at], visible: true });
      const sizes = titles.filter(([, field]) => field in data && data[field][at] !== "0 B").map(([title, field]) => `${title} ${data[field][at]}`);
      const where = data.operator[at] ? `${data.phase[at]}, ${data.operator[at]} in ${data.module[at]}` : "the step begins";
      output.value = `${where}. ${sizes.join("; ")}.`;
      slider.setAttribute("aria-valuetext", output.value);
    };
    const show = (start, stop) => root.x_range.setv({ start, end: stop });
    const actions = {
      peak() {
        slider.value = data.top.indexOf ? data.top.indexOf(Math.max(...data.top)) : 0;
        tell();
      },
      zoom() {
        const half = (root.x_range.end - root.x_range.start) / 4;
        const middle = Math.min(Math.max(data.left[Number(slider.value)], half), end - half);
        show(middle - half, middle + half);
      },
      whole: () => show(0, end),
    };
    slider.addEventListener("input", tell);
    for (const button of part.querySelectorAll("button")) {
      button.addEventListener("click", actions[button.dataset.do]);
      button.disabled = false;
    }
    slider.disabled = false;
  }

  function glyph_titles(root) {
    const rows = root.toolbar.tools.find((tool) => tool.type === "HoverTool").tooltips;
    return rows.map(([title, field]) => [title, field.slice(1)]).filter(([title]) => !["", "operator", "module"].includes(title));
  }

  // Tables: sorted by a column, filtered by a text.
  function sortable(table) {
    const body = table.tBodies[0];
    const heads = [...table.tHead.rows[0].cells];
    const key = (row, at) => (row.cells[at].dataset.value === undefined ? row.cells[at].textContent : Number(row.cells[at].dataset.value));
    heads.forEach((head, at) => head.querySelector("button").addEventListener("click", () => {
      const is_up = head.getAttribute("aria-sort") === "descending" || (at === 0 && head.getAttribute("aria-sort") !== "ascending");
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", is_up ? "ascending" : "descending");
      const order = (a, b) => (key(a, at) < key(b, at) ? -1 : key(a, at) > key(b, at) ? 1 : 0) * (is_up ? 1 : -1);
      body.append(...[...body.rows].sort(order));
    }));
  }

  function filter(input, table, count) {
    input.addEventListener("input", () => {
      const rows = [...table.tBodies[0].rows];
      for (const row of rows) row.hidden = !row.cells[0].textContent.toLowerCase().includes(input.value.toLowerCase());
      count.value = `${rows.filter((row) => !row.hidden).length} of ${rows.length}`;
    });
  }

  function start(tries) {
    const wanted = document.querySelectorAll(".drawing").length;
    if (typeof Bokeh === "undefined" || roots().length < wanted) {
      if (tries > 0) setTimeout(start, 20, tries - 1);
      return;
    }
    paint();
    dark.addEventListener("change", paint);
    document.querySelectorAll(".moment").forEach(bind);
    document.documentElement.dataset.ready = "yes";
  }

  sortable(document.getElementById("modules-table"));
  filter(document.getElementById("modules-filter"), document.getElementById("modules-table"), document.getElementById("modules-count"));
  start(500);
})();
