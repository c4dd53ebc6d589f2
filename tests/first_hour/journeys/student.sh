# A student with a model of Hugging Face: fine-tune it on chats, measure it, talk with it, and take it along.
# expect: held-out text (the run's own): 7 documents
# expect: bits per byte
# expect: accuracy
# expect: What is the capital of Norway?
# expect: 2 messages are in talk.txt
# expect: LlamaForCausalLM opened
python "$CLONE/examples/tiny_model.py" models/tiny --hidden-size 64
cp "$CLONE/examples/chat.jsonl" chat.jsonl
sed -e 's|examples/chat.jsonl|chat.jsonl|' -e 's|"ranks": 2|"ranks": 1|' -e 's|"steps": 100|"steps": 12|' \
    "$CLONE/examples/chat.json" > chat.json
zeromesh train chat.json

# Better than the model that it began with?
cat > questions.csv <<'QUESTIONS'
question,A,B,answer
What is the capital of Norway?,Oslo.,Cooking oil.,A
How many minutes are in a day?,Oslo.,"1,440: 24 hours of 60 minutes each.",B
QUESTIONS
zeromesh evaluate runs/chat
zeromesh evaluate models/tiny --data chat.jsonl --choices questions.csv --chat
zeromesh evaluate runs/chat --data chat.jsonl --choices questions.csv --chat --json > after.json
python -c 'import json; assert json.load(open("after.json"))["held_out"]["loss"] < 6.5'

printf 'What is the capital of Norway?\n/save talk.txt\n' | zeromesh chat runs/chat --temperature 0 --tokens 20
cat talk.txt

zeromesh export runs/chat my-model
python - <<'OPEN'
from transformers import AutoModelForCausalLM, AutoTokenizer

model, tokenizer = AutoModelForCausalLM.from_pretrained("my-model"), AutoTokenizer.from_pretrained("my-model")
question = [{"role": "user", "content": "What is the capital of Norway?"}]
ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
assert model.generate(**ids, max_new_tokens=5).shape[1] > ids["input_ids"].shape[1]
print(type(model).__name__, "opened")
OPEN
