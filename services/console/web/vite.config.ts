import react from "@vitejs/plugin-react";
import { defineConfig } from "vitest/config";

export default defineConfig({
  plugins: [react()],
  build: {
    outDir: "../forage_console/static",
    emptyOutDir: true,
    sourcemap: false,
    // The content security policy allows no data: addresses.
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
    license: { fileName: "licenses.txt" },
    reportCompressedSize: false,
  },
  server: {
    host: "127.0.0.1",
    proxy: { "/api": "http://127.0.0.1:18650", "/login": "http://127.0.0.1:18650" },
    fs: { allow: ["../.."] },
  },
  test: {
    environment: "jsdom",
    setupFiles: ["src/testing/setup.ts"],
    include: ["src/**/*.test.{ts,tsx}"],
    // One jsdom for all files of a thread: three times as fast. What a test replaces is put back after it.
    pool: "threads",
    isolate: false,
    restoreMocks: true,
    testTimeout: 300_000,
    unstubGlobals: true,
    css: false,
  },
});
