// A live patch board: its page in a frame that can reach nothing else, whose messages go to the kernel and back.
export default {
  render({ model, el }) {
    const frame = document.createElement("iframe");
    frame.setAttribute("sandbox", "allow-scripts allow-downloads");
    frame.title = "patch board";
    frame.style.cssText = `width:100%;height:${model.get("height")}px;border:0`;
    const fromPage = (event) => {
      if (event.source === frame.contentWindow && event.data && event.data.board) model.send(event.data.board);
    };
    const fromKernel = (message) => {
      if (frame.contentWindow) frame.contentWindow.postMessage({ board: message }, "*");
    };
    window.addEventListener("message", fromPage);
    model.on("msg:custom", fromKernel);
    frame.srcdoc = model.get("page");
    el.append(frame);
    return () => {
      window.removeEventListener("message", fromPage);
      model.off("msg:custom", fromKernel);
    };
  },
};
