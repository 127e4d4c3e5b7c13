import js from "@eslint/js";
import prettier from "eslint-config-prettier";
import a11y from "eslint-plugin-jsx-a11y";
import hooks from "eslint-plugin-react-hooks";
import globals from "globals";
import typescript from "typescript-eslint";

export default typescript.config(
  { ignores: ["src/api/schema.d.ts"] },
  js.configs.recommended,
  {
    files: ["**/*.{ts,tsx}"],
    extends: [...typescript.configs.strictTypeChecked, hooks.configs.flat.recommended, a11y.flatConfigs.recommended],
    languageOptions: {
      globals: globals.browser,
      parserOptions: { projectService: true, tsconfigRootDir: import.meta.dirname },
    },
    rules: {
      "@typescript-eslint/restrict-template-expressions": ["error", { allowNumber: true }],
      // A box that scrolls must be reachable with the keyboard.
      "jsx-a11y/no-noninteractive-tabindex": ["error", { roles: ["region", "tabpanel"], tags: [] }],
      "no-restricted-syntax": [
        "error",
        {
          selector: "JSXAttribute[name.name='dangerouslySetInnerHTML']",
          message: "Texts of models are shown as text: build elements instead.",
        },
        {
          selector: "AssignmentExpression > MemberExpression[property.name=/^(innerHTML|outerHTML)$/]",
          message: "Texts of models are shown as text: use textContent.",
        },
        {
          selector: "JSXAttribute[name.name='href'] > JSXExpressionContainer",
          message: "An address that is data may be a script: use Link, or ExternalLink, which checks the scheme.",
        },
      ],
    },
  },
  {
    files: ["**/*.test.tsx"],
    rules: { "no-restricted-syntax": "off" },
  },
  prettier,
);
