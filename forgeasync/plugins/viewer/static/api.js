// Asks the viewer's own server; what it refuses becomes an Error with its words.

export async function ask(name, parameters = {}) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(parameters)) {
    if (value !== null && value !== undefined && value !== "") query.set(key, value);
  }
  let response;
  try {
    response = await fetch(`api/${name}?${query}`);
  } catch {
    throw new Error("the viewer does not answer: it has ended, or was killed; start python -m apps.view again");
  }
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error);
  if (answer.failure) throw new Error(answer.failure);
  return answer;
}
