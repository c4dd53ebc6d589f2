# A beginner: a configuration by flags, a typo on the way, training, an interrupted and resumed run, and an answer.
# expect: wrote chats.yaml: models/tiny
# expect: zeromesh train chats.yaml
# expect: run.epoch is not a known key; did you mean run.epochs?
# expect: run.epochs = 2 takes
# expect: continue it with --resume
# expect: lowest validation loss
# expect: What is the capital of Norway?
# expect: no configuration file: models/tiny
python "$CLONE/examples/tiny_model.py" models/tiny
head -n 40 "$CLONE/examples/chat.jsonl" > chats.jsonl

zeromesh init models/tiny chats.jsonl --device cpu --full --output runs/chats
cat chats.yaml
test "$(wc -l < chats.yaml)" -lt 25

# The typo: a key that does not exist, and then a command in the wrong order.
sed 's/epochs: 3/epoch: 2/' chats.yaml > typo.yaml
status=0; zeromesh train typo.yaml || status=$?
test "$status" -eq 2
status=0; zeromesh train chats.jsonl models/tiny || status=$?
test "$status" -eq 2

sed -i 's/epochs: 3/epochs: 2/' chats.yaml
zeromesh train chats.yaml --set run.keep_best=true --set run.evaluate_every=5 --set run.save_every=5

# Once more: the folder is taken; longer: the same run goes on.
status=0; zeromesh train chats.yaml || status=$?
test "$status" -eq 2
zeromesh train chats.yaml --resume --set run.keep_best=true --set run.evaluate_every=5 --set run.save_every=5
zeromesh sample runs/chats "What is the capital of Norway?" --chat --tokens 8
zeromesh export runs/chats best --tag best
test -f best/model.safetensors

# Without a file, with the same defaults.
zeromesh train models/tiny chats.jsonl --set run.output=runs/again --set run.epochs=0.1
