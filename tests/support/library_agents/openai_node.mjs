// The first examples of OpenAI's package for Node: a response, a completion, and a streamed response.
import OpenAI from "openai";

const client = new OpenAI();

const response = await client.responses.create({
  model: "gpt-5.5",
  instructions: "You are a coding assistant that talks like a pirate",
  input: "Are semicolons optional in JavaScript?",
});
console.log(response.output_text);

const completion = await client.chat.completions.create({
  model: "gpt-5.5",
  messages: [
    { role: "developer", content: "Talk like a pirate." },
    { role: "user", content: "Are semicolons optional in JavaScript?" },
  ],
});
console.log(completion.choices[0].message.content);

const stream = await client.responses.create({
  model: "gpt-5.5",
  input: "Say \"Sheep sleep deep\" ten times fast!",
  stream: true,
});
for await (const event of stream) {
  console.log(event);
}
