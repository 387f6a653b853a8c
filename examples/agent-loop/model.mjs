// Stands for a model's API: node model.mjs SECONDS. Prints its URL; thinks for SECONDS; says when a caller hangs up.

import { createServer } from 'node:http';

const seconds = Number(process.argv[2]);
const latest = new Map(); // the fencing token of each result

const server = createServer(async (request, response) => {
  let body = '';
  for await (const chunk of request) body += chunk;
  if (request.method === 'PUT') {
    const { fencing_token } = JSON.parse(body);
    const stale = (latest.get(request.url) ?? 0) > fencing_token;
    if (!stale) latest.set(request.url, fencing_token);
    response.writeHead(stale ? 409 : 204).end();
    return;
  }
  const timer = setTimeout(() => response.end(`thoughts on ${body}`), seconds * 1000);
  response.on('close', () => {
    clearTimeout(timer);
    if (!response.writableFinished) console.log(`the caller hung up: ${body}`);
  });
});
server.listen(0, '127.0.0.1', () => console.log(`http://127.0.0.1:${server.address().port}`));
