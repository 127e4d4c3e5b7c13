import "@testing-library/jest-dom/vitest";
import { notifications } from "@mantine/notifications";
import { cleanup, configure } from "@testing-library/react";
import { afterEach } from "vitest";

afterEach(() => {
  notifications.clean();
  cleanup();
});
// A busy machine takes its time, as to load a page that is first shown; what is there at once is found at once.
configure({ asyncUtilTimeout: 120_000 });

// What Mantine and charts ask of a browser and jsdom lacks: nothing matches, nothing has a size, no font loads.
window.matchMedia = (query) => {
  const list = new EventTarget() as MediaQueryList;
  return Object.assign(list, {
    matches: false,
    media: query,
    onchange: null,
    addListener: () => undefined,
    removeListener: () => undefined,
  });
};
window.ResizeObserver = class {
  observe() {
    return undefined;
  }
  unobserve() {
    return undefined;
  }
  disconnect() {
    return undefined;
  }
};
Object.defineProperty(document, "fonts", { value: new EventTarget(), configurable: true });
window.scrollTo = () => undefined;
Element.prototype.scrollIntoView = () => undefined;
