/* Small helpers that make elements, and change only what differs. Text is always set as text, never parsed. */

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

/** Makes an element. `attributes`: name → value; null and false leave it out. `children`: elements or text. */
export function make(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

export function makeSvg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) {
      element.setAttribute(name, value === true ? "" : String(value));
    }
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function setClass(element, name) {
  if (element.className !== name) element.className = name;
}

export function setHidden(element, hidden) {
  if (element.hidden !== hidden) element.hidden = hidden;
}

const known = new WeakMap();

/**
 * Makes the children of `parent` those of `items`, in their order. An element is made when its key is new, and changed
 * only when its item says something new.
 *
 * @param items each `{key, ...}` of plain values
 * @param create makes the element of an item
 * @param change puts a changed item into its element; without it a changed element is made again
 */
export function sync(parent, items, create, change = null) {
  const before = known.get(parent) ?? new Map();
  const after = new Map();
  let place = parent.firstElementChild;
  for (const item of items) {
    const says = JSON.stringify(item);
    let entry = before.get(item.key);
    if (entry === undefined) {
      entry = { element: create(item), says };
    } else if (entry.says !== says) {
      if (change !== null) {
        change(entry.element, item);
      } else {
        const made = create(item);
        const focused = entry.element.contains(document.activeElement);
        if (place === entry.element) place = made;
        entry.element.replaceWith(made);
        if (focused) made.querySelector("summary")?.focus();
        entry.element = made;
      }
      entry.says = says;
    }
    before.delete(item.key);
    after.set(item.key, entry);
    if (place === entry.element) place = place.nextElementSibling;
    else parent.insertBefore(entry.element, place);
  }
  for (const entry of before.values()) entry.element.remove();
  known.set(parent, after);
}
