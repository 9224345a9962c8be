// A live patch board: its page in a frame that can reach nothing else, whose messages go to the kernel and back.
export default {
  render({ model, el }) {
    const frame = document.createElement("iframe");
    frame.setAttribute("sandbox", "allow-scripts allow-downloads");
    frame.title = "patch board";
    frame.style.cssText = `width:100%;height:${model.get("height")}px;border:0`;
    const fromPage = ({ source, data }) => {
      if (source !== frame.contentWindow || !data) return;
      if (data.board) model.send(data.board);
      if (data.headwater > 0) frame.style.height = `${Math.min(20000, Math.ceil(data.headwater))}px`;
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
