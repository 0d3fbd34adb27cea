// The AI SDK as its documents begin: `node ai_sdk.mjs WHAT URL` prints what each provider answers, as JSON.
import { createOpenAI } from '@ai-sdk/openai'
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { embedMany, generateText, Output, stepCountIs, streamText, tool } from 'ai'
import { z } from 'zod'

const [what, baseURL] = process.argv.slice(2)
const openai = createOpenAI({ baseURL, apiKey: 'x' })
const compatible = createOpenAICompatible({ name: 'ours', baseURL, apiKey: 'x', supportsStructuredOutputs: true })
const weather = tool({
  description: 'Tells the weather of a city.',
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => (city === 'Bern' ? 'dry' : 'unknown'),
})
const pieces = async (asked) => {
  const found = []
  for await (const piece of streamText(asked).textStream) found.push(piece)
  return found
}
const answers = {
  chat: async (asked) => (await generateText(asked)).text,
  streaming: pieces,
  tools: async (asked) => (await generateText({ ...asked, tools: { weather }, stopWhen: stepCountIs(2) })).text,
  structured_output: async (asked) =>
    (await generateText({ ...asked, output: Output.object({ schema: z.object({ ok: z.boolean() }) }) })).output,
}
const embed = (model) => embedMany({ model, values: ['a', 'b', 'c'], maxRetries: 0 })
const found =
  what === 'embeddings'
    ? (await embed(compatible.embeddingModel('model'))).embeddings
    : await Promise.all(
        [openai.responses, openai.chat, compatible].map((provider) =>
          answers[what]({ model: provider('model'), prompt: 'Rain?', maxRetries: 0 }),
        ),
      )
console.log(JSON.stringify(found))
